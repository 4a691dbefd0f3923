"""`LocalWorkers`: makes workers on this machine, for a pool outside of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.rewards.adapter.decorators import check_options
from async_grpo.rewards.adapter.registry_source import (
    RewardRegistrySource,
    display_name,
    parse_names,
    registry_file,
    resolve,
)
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.isolation.adapter_process import AdapterProcess, named_environment
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.verifier_worker import VerifierWorker


class LocalWorkers:
    """Makes the workers of a VerifierPool: processes for rewards, and clients in this process for judges.

    See `VerifierPool.from_registry` for the arguments and errors.
    """

    def __init__(
        self,
        names: str | Sequence[str],
        registry: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        reward_env: str | Sequence[str] = (),
        judge_addresses: JudgeAddresses | None = None,
    ) -> None:
        full_names = parse_names(names)
        self.source = RewardRegistrySource.from_file(registry_file(registry)).with_files(full_names)
        if options or not full_names:
            # `resolve` refuses an empty list of names
            check_options(resolve(self.source, full_names), options or {})
        self.adapters = tuple(display_name(name) for name in full_names)
        self.judges: set[str] = set()  # names of the judges for which `make` has made a worker
        self._options = options
        self._environment = named_environment(parse_names(reward_env))
        self._rate_limiter = Limiter()
        self._judge_addresses = judge_addresses or JudgeAddresses()

    async def make(self, adapter: str) -> VerifierWorker:
        """Make and start a worker of the adapter."""
        # A separate process imports the registry file first, so that a file that crashes or hangs cannot harm this one
        process = AdapterProcess(self.source, adapter, self._options, environment=self._environment)
        if not (await process.start()).traits.is_judge:
            return process
        await process.close()
        self.judges.add(adapter)
        judge: Any = self._judge_addresses.with_address(resolve(self.source, [adapter])[adapter])
        return JudgeWorker(adapter, judge, judge.endpoint(), self._rate_limiter, "train")
