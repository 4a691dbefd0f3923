"""`Combination`: chooses the adapters that score a sample, and combines their rewards into one verdict."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.result import PLAUSIBLE_REWARD, is_plausible
from async_grpo.types import AdapterResult, RewardStatus, Verdict

MODES = ("best", "sum", "mean", "product", "gate")

Ask = Callable[[str], Awaitable[AdapterResult]]


@dataclass(frozen=True)
class Combination:
    """Rule that combines the results of a sample into its verdict.

    The modes are:

        best      the highest reward
        sum       the weighted sum of the rewards
        mean      the weighted mean of the rewards
        product   the product of the rewards
        gate      calls one adapter after the other, in the given order, as long as each reward reaches `threshold`. The
                  last adapter that was called decides the reward. So cheap rules can come before paid judges.

    If an adapter failed or timed out, the combined reward is unknown. The verdict then has the status of that adapter,
    or FAILED if one failed and another timed out. `constants` can replace the missing reward.

    Adapters that abstained are left out. The verdict is ABSTAINED if all adapters abstained, if the weights of the
    other adapters are all 0 in a `sum`, or if these weights add up to 0 or less in a `mean`. A combined reward whose
    absolute value exceeds `MAX_REWARD` makes the verdict FAILED.

    Args:
        adapters: Names of the adapters.
        mode: One of MODES.
        weights: Weights by adapter, for `sum` and `mean`. The default weight is 1.
        threshold: Lowest reward that passes a gate.
        column: Column of the row that names the adapters that score this sample, as a comma separated list. If None,
            all adapters score every sample.
        constants: Constant by adapter, which replaces the reward if the adapter failed or timed out.
    """

    adapters: tuple[str, ...]
    mode: str = "best"
    weights: Mapping[str, float] = field(default_factory=dict)
    threshold: float = 0.5
    column: str | None = None
    constants: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.adapters or len(set(self.adapters)) != len(self.adapters):
            raise ConfigurationError(
                f"the adapters are {self.adapters}: name at least one adapter, and none of them twice"
            )
        if self.mode not in MODES:
            modes = ", ".join(MODES)
            raise ConfigurationError(f"unknown reward combination {self.mode!r}; choose one of {modes}")
        self._refuse_unknown("weight", self.weights)
        self._refuse_unknown("constant", self.constants)
        if self._combined(dict.fromkeys(self.adapters, 0.0)) is None:
            condition = "a positive sum of weights" if self.mode == "mean" else "a weight that is not 0"
            raise ConfigurationError(f"a {self.mode} needs {condition}, not {dict(self.weights)}")

    def _refuse_unknown(self, kind: str, numbers: Mapping[str, float]) -> None:
        unknown = ", ".join(sorted(set(numbers) - set(self.adapters)))
        if unknown:
            adapters = ", ".join(self.adapters)
            raise ConfigurationError(f"a {kind} is given for {unknown}, but the adapters are {adapters}")

    def chosen(self, sample: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the adapters that score this sample, without duplicates.

        Raises:
            ConfigurationError: The sample's column is missing or names an adapter that the run does not have.
        """
        if self.column is None:
            return self.adapters
        value = sample.get(self.column)
        parts = value.split(",") if isinstance(value, str) else []
        names = tuple(dict.fromkeys(part.strip() for part in parts))
        if not names or set(names) - set(self.adapters):
            raise ConfigurationError(
                f"the column {self.column!r} of a row says {value!r}; it must name some of {', '.join(self.adapters)}"
            )
        return names

    def verdict(self, results: Sequence[AdapterResult]) -> Verdict:
        """Combine the results of a sample into its verdict.

        >>> ok = AdapterResult("mathd", RewardStatus.OK, 0.0)
        >>> best = Combination(("mathd", "sympy"))
        >>> best.verdict([ok, AdapterResult("sympy", RewardStatus.OK, 1.0)]).reward
        1.0
        >>> best.verdict([ok, AdapterResult("sympy", RewardStatus.TIMED_OUT)]).status.value
        'timed_out'
        """
        results = tuple(results)
        for status in (RewardStatus.FAILED, RewardStatus.TIMED_OUT):
            if any(result.status is status and result.adapter not in self.constants for result in results):
                return Verdict(status, None, results)
        rewards = {}
        for result in results:
            if result.status is not RewardStatus.ABSTAINED:
                reward = self.constants[result.adapter] if result.reward is None else result.reward
                rewards[result.adapter] = reward
        combined = self._combined(rewards)
        if combined is None:
            return Verdict(RewardStatus.ABSTAINED, None, results)
        if not is_plausible(combined):
            reason = f"the {self.mode} of the rewards {rewards} is {combined}: {PLAUSIBLE_REWARD}"
            failed = tuple(replace(result, reason=reason) for result in results)
            return Verdict(RewardStatus.FAILED, None, failed)
        is_filled = any(result.status.is_lost for result in results)
        return Verdict(RewardStatus.OK, combined, results, filled=is_filled)

    async def __call__(self, sample: Mapping[str, Any], ask: Ask, in_turn: bool = False) -> Verdict:
        """Call the adapters of a sample and return its verdict.

        Args:
            sample: The sample.
            ask: Calls an adapter by name.
            in_turn: Call one adapter after the other in every mode. Use this if all adapters
                answer at once.
        """
        names = self.chosen(sample)
        if self.mode == "gate":
            return await self._pass_gates(names, ask)
        if len(names) == 1 or in_turn:
            # Concurrent tasks would cost time and save none
            results = []
            for name in names:
                results.append(await ask(name))
            return self.verdict(results)
        return self.verdict(await asyncio.gather(*(ask(name) for name in names)))

    async def _pass_gates(self, names: Sequence[str], ask: Ask) -> Verdict:
        """Call the adapters in order, until one fails or gives a reward below the threshold."""
        results: list[AdapterResult] = []
        for name in names:
            result = await ask(name)
            results.append(result)
            if result.status is RewardStatus.ABSTAINED:
                continue
            verdict = self.verdict(results)
            if verdict.reward is None or verdict.reward < self.threshold:
                break
        return self.verdict(results)

    def _combined(self, rewards: Mapping[str, float]) -> float | None:
        """Return the combined reward, or None if there are no rewards or their weights cannot be used.

        If the numbers are too large, the result is infinite or NaN. (`math.fsum` would raise an error.)
        """
        weights = [self.weights.get(name, 1.0) for name in rewards]
        values = list(rewards.values())
        total = sum(weight * value for weight, value in zip(weights, values, strict=True))
        match self.mode:
            case "sum":
                return total if any(weights) else None
            case "mean":
                return total / sum(weights) if sum(weights) > 0 else None
            case "product":
                return math.prod(values) if values else None
            case "best":
                return max(values, default=None)
        # In the mode "gate", the last reward counts: that of the gate that stopped, or of the last adapter
        return values[-1] if values else None
