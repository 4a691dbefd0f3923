"""The workers of a pool on this machine alone: processes for rewards, and clients in this process for judges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from async_grpo.data import registry_file
from async_grpo.rewards.adapter.decorators import check_options
from async_grpo.rewards.adapter.registry_source import (
    RewardRegistrySource,
    display_name,
    parse_names,
    resolve,
)
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.isolation.adapter_process import AdapterProcess, process_maker
from async_grpo.rewards.isolation.spawn import named_environment
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.verifier_worker import VerifierWorker


class LocalWorkers:
    """`make` is `make_worker` of a VerifierPool. `look_at_groups`: whether a reward does that was made a worker.

    Args:
        options: keyword options; a reward receives those that it names.
        adapters: what the rewards are known by.
        reward_env: environment variables of this process that the rewards' processes get as well.
        judge_addresses: of the judges whose entry says no `url`.
    """

    def __init__(
        self,
        source: RewardRegistrySource,
        options: Mapping[str, Any] | None,
        adapters: Sequence[str],
        reward_env: str | Sequence[str] = (),
        judge_addresses: JudgeAddresses | None = None,
    ) -> None:
        self._judge_addresses = judge_addresses or JudgeAddresses()
        self.adapters, self.look_at_groups = tuple(adapters), False
        self.source, self._rate_limiter = source, Limiter()
        self.environment = named_environment(parse_names(reward_env))
        self._make_process = process_maker(source, options, environment=self.environment)

    @classmethod
    def from_registry(
        cls,
        names: str | Sequence[str],
        registry: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        reward_env: str | Sequence[str] = (),
        judge_addresses: JudgeAddresses | None = None,
    ) -> Self:
        """Workers for rewards of a registry file, or of files of their own (FILE.py:NAME).

        Raises:
            ConfigurationError: a file cannot be used; an option is unknown, no reward is named, or a variable is not set.
        """
        named = parse_names(names)
        source = RewardRegistrySource.from_file(registry_file(registry)).with_files(named)
        if options or not named:
            check_options(resolve(source, named), options or {})
        return cls(source, options, [display_name(name) for name in named], reward_env, judge_addresses)

    async def make(self, adapter: str) -> VerifierWorker:
        # The registry file is first imported in a process of its own, whatever it does
        process: AdapterProcess = await self._make_process(adapter)
        self.look_at_groups |= process.has_post_process
        if not process.traits.is_judge:
            return process
        await process.close()
        judge: Any = self._judge_addresses.give(resolve(self.source, [adapter])[adapter])
        return JudgeWorker(adapter, judge, judge.endpoint(), self._rate_limiter, "train")
