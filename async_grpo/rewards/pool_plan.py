"""What a run's verifier pool is made of, in a form that travels to the pool's actor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from async_grpo.rewards.combine import Combination
from async_grpo.rewards.http.limits import Limits


@dataclass(frozen=True)
class PoolConfig:
    """SharedRunSettings of a pool; names are those of `RewardRegistrySource`'s adapters.

    Args:
        options: keyword options of the adapters.
        workers, evaluation_workers: processes, by adapter and for each.
        limits: of calls over the whole cluster, by adapter.
        cache_path: of the verdict cache; None: none. `cache_max_bytes`: of its entries; None: no limit.
        budget: what paid judges may cost together; None: no limit. `budget_path` remembers what was spent.
    """

    combination: Combination
    options: Mapping[str, Any] = field(default_factory=dict)
    workers: Mapping[str, int] = field(default_factory=dict)
    evaluation_workers: int = 1
    timeout_s: float = 30.0
    memory_limit_bytes: int = 8 * 2**30
    fallbacks: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, Limits] = field(default_factory=dict)
    cache_path: str | None = None
    cache_max_bytes: int | None = None
    budget: float | None = None
    budget_policy: str = "pause"
    budget_path: str | None = None
    secrets: Mapping[str, str] = field(
        default_factory=dict, repr=False
    )  # environment variables with judges' keys

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.combination.adapters

    @property
    def all_adapters(self) -> tuple[str, ...]:
        """The adapters, and who stands in for them."""
        return tuple(dict.fromkeys([*self.adapters, *self.fallbacks.values()]))
