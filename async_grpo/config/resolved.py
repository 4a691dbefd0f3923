"""The rewards of a run, looked up once: what the registry file says of the names in `--reward-fns`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from async_grpo.data import registry_file
from async_grpo.errors import ConfigurationError
from async_grpo.experience.config import RunFacts
from async_grpo.rewards.adapter.decorators import best_reward_of, traits_of
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.middleware import PRICE


@dataclass(frozen=True)
class ResolvedRewards:
    """`adapters`: the run's rewards by name. `everyone`: they, and those that stand in for them."""

    source: RewardRegistrySource
    adapters: Mapping[str, Any]
    everyone: Mapping[str, Any]

    @classmethod
    def of(cls, config: RewardConfig) -> "ResolvedRewards":
        """Read the registry file and the files that are named, and find the rewards.

        Raises:
            ConfigurationError: a file cannot be read, or a name is unknown; says which are known.
        """
        source = read_registry(config)
        addresses = config.judge_addresses
        everyone = {name: addresses.give(one) for name, one in resolve(source, config.all_names).items()}
        return cls(source, {name: everyone[name] for name in config.adapters}, everyone)

    def _with(self, trait: str) -> list[str]:
        return [name for name, adapter in self.everyone.items() if getattr(traits_of(adapter), trait)]

    @property
    def process(self) -> list[str]:
        """The run's rewards that come step by step."""
        return [name for name in self._with("is_process_reward") if name in self.adapters]

    @property
    def whole_groups(self) -> list[str]:
        """Those that look at a whole group before its rewards are final."""
        return self._with("has_post_process")

    @property
    def judges(self) -> list[str]:
        return self._with("is_judge")

    @property
    def paid(self) -> list[str]:
        """The judges that have a price."""
        return [name for name in self.judges if getattr(self.everyone[name], PRICE, None)]

    def facts(self, config: RewardConfig, max_completion_tokens: int) -> RunFacts:
        """What the batcher must know of them."""
        return RunFacts(
            max_completion_tokens,
            process=tuple(self.process),
            whole_groups=any(name in self.adapters for name in self.whole_groups),
            weights=config.weights_by_name,
            failure_policies=config.failure_policies,
            best_rewards={
                name: best_reward_of(adapter, config.options_by_name)
                for name, adapter in self.adapters.items()
            },
        )

    def secrets(self) -> dict[str, str]:
        """The keys that the judges name, from this process's environment.

        They go to the pool as an argument and nowhere else: Ray's job table and the workers' environments can be read
        by others.

        Raises:
            ConfigurationError: a key is not in the environment.
        """
        named = {self.everyone[name].endpoint().api_key_env for name in self.judges} - {None}
        if missing := sorted(named - set(os.environ)):
            raise ConfigurationError(
                f"a judge's key is missing: set the environment variable {', '.join(missing)}"
            )
        return {name: os.environ[name] for name in named}


def read_registry(config: RewardConfig) -> RewardRegistrySource:
    """The registry file, and the files among the names. Raises ConfigurationError if one cannot be read."""
    page = RewardRegistrySource.from_file(registry_file(config.reward_registry))
    return page.with_files(config.reward_fns)
