"""Several adapters on one sample -> one verdict: who is asked, and how their rewards become one."""

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
    """How the results of a sample become its verdict.

    Modes: `best` (the highest), `sum` and `mean` (weighted), `product`; `gate` asks one adapter after the other, in the
    order given, as long as each passes `threshold`: cheap rules go before paid judges, and the reward is that of the
    last one asked.

    If any adapter that was asked failed or timed out, the combination is unknown: the verdict is that status (a failure
    goes before a time-out) and the sample is masked, not scored; unless `constants` has a reward for that adapter's
    failures. Adapters that abstained are left out. If all did, so does the verdict; also if those that answered have no
    weight together: 0 in a `sum`, 0 or less in a `mean`. A combination that cannot be meant (`MAX_REWARD`) has failed.

    Args:
        weights: by adapter, for `sum` and `mean`; 1 where not named.
        threshold: the reward from which a gate opens.
        column: of the row, naming the adapters that judge this sample (a comma list); None: all of them judge all.
        constants: by adapter, the reward that stands in for a failure of it.
    """

    adapters: tuple[str, ...]
    mode: str = "best"
    weights: Mapping[str, float] = field(default_factory=dict)
    threshold: float = 0.5
    column: str | None = None
    constants: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.adapters or len(set(self.adapters)) != len(self.adapters):
            raise ConfigurationError(f"at least one adapter is needed, and each once, not {self.adapters}")
        if self.mode not in MODES:
            known = ", ".join(MODES)
            raise ConfigurationError(f"unknown reward combination {self.mode!r}; choose one of {known}")
        for what, named in (("weight", self.weights), ("constant", self.constants)):
            if unknown := ", ".join(sorted(set(named) - set(self.adapters))):
                known = ", ".join(self.adapters)
                raise ConfigurationError(f"a {what} is given for {unknown}, but the adapters are {known}")
        if self._combined(dict.fromkeys(self.adapters, 0.0)) is None:
            needed = "a positive sum of weights" if self.mode == "mean" else "a weight that is not 0"
            raise ConfigurationError(f"a {self.mode} needs {needed}, not {dict(self.weights)}")

    def chosen(self, sample: Mapping[str, Any]) -> tuple[str, ...]:
        """The adapters that judge this sample, each once.

        ConfigurationError: its column is missing or names an adapter that the run does not have.
        """
        if self.column is None:
            return self.adapters
        named = sample.get(self.column)
        parts = named.split(",") if isinstance(named, str) else ()
        names = tuple(dict.fromkeys(part.strip() for part in parts))
        if not names or set(names) - set(self.adapters):
            raise ConfigurationError(
                f"the column {self.column!r} of a row says {named!r}; it must name some of {', '.join(self.adapters)}"
            )
        return names

    def verdict(self, results: Sequence[AdapterResult]) -> Verdict:
        """The verdict of these results.

        >>> ok = AdapterResult("mathd", RewardStatus.OK, 0.0)
        >>> best = Combination(("mathd", "sympy"))
        >>> best.verdict([ok, AdapterResult("sympy", RewardStatus.OK, 1.0)]).reward
        1.0
        >>> best.verdict([ok, AdapterResult("sympy", RewardStatus.TIMED_OUT)]).status.value
        'timed_out'
        """
        results = tuple(results)
        for unknown in (RewardStatus.FAILED, RewardStatus.TIMED_OUT):
            if any(result.status is unknown and result.adapter not in self.constants for result in results):
                return Verdict(unknown, None, results)
        rewards = {
            result.adapter: self.constants[result.adapter] if result.reward is None else result.reward
            for result in results
            if result.status is not RewardStatus.ABSTAINED
        }
        combined = self._combined(rewards)
        if combined is None:
            return Verdict(RewardStatus.ABSTAINED, None, results)
        if not is_plausible(combined):
            reason = f"the {self.mode} of the rewards {rewards} is {combined}: {PLAUSIBLE_REWARD}"
            failed = tuple(replace(result, reason=reason) for result in results)
            return Verdict(RewardStatus.FAILED, None, failed)
        filled = any(result.status.is_lost for result in results)
        return Verdict(RewardStatus.OK, combined, results, filled)

    async def __call__(self, sample: Mapping[str, Any], ask: Ask, in_turn: bool = False) -> Verdict:
        """Ask whom it takes, all at once or, at a gate, one after the other; `in_turn`: none has to wait for its answer."""
        names = self.chosen(sample)
        if self.mode != "gate" and len(names) > 1 and not in_turn:
            return self.verdict(await asyncio.gather(*(ask(name) for name in names)))
        results: list[AdapterResult] = []
        for name in names:
            results.append(await ask(name))
            if self.mode != "gate":
                continue
            verdict = self.verdict(results)
            abstained = results[-1].status is RewardStatus.ABSTAINED
            if not abstained and (verdict.reward is None or verdict.reward < self.threshold):
                break
        return self.verdict(results)

    def _combined(self, rewards: Mapping[str, float]) -> float | None:
        """None if these adapters have no weight together: it would become a silent 0. Not finite where the numbers are
        too large; `sum` and not `fsum`, which would raise."""
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
        return values[-1] if values else None  # gate
