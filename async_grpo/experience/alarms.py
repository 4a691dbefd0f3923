"""What the user should look at, in words: numbers that go wrong without an error."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.experience.config import BatchConfig
from async_grpo.types import Group

ENOUGH_REWARDS, ENOUGH_STEPS = 50, 3  # of an adapter, before it is said to know one value only


class StepAlarms:
    """The alarms of each step. It remembers for how many steps a reward has said one value only.

    Args:
        best_rewards: the highest reward of an adapter by its name; 1 where none is given.

    >>> alarms = StepAlarms(BatchConfig(failure_alarm=0.1))
    >>> alarms.of_step([], {"judge": {"ok": 1, "failed": 3, "first_reason": "HTTP 500"}})
    ['judge: 3 of 4 calls failed (HTTP 500)']
    >>> alarms.of_step([], {"judge": {"ok": 4, "breakers_opened": 1}})
    ['judge: a server of it went out of service 1 time(s)']
    """

    def __init__(self, limits: BatchConfig, best_rewards: Mapping[str, float] | None = None) -> None:
        self._limits, self._best_rewards = limits, best_rewards or {}
        self._constant_steps: Counter[str] = Counter()

    def of_step(self, groups: Sequence[Group], verifiers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The alarms of the next step; usually none.

        Args:
            verifiers: `VerifierPool.stats` of the step.
        """
        alarms = _about_samples(groups, self._limits)
        for name, stats in verifiers.items():
            alarms += [*_about_failures(name, stats, self._limits), *self._about_constant(name, stats)]
            if opened := stats.get("breakers_opened", 0):
                alarms.append(f"{name}: a server of it went out of service {opened} time(s)")
        return alarms

    def _about_constant(self, name: str, stats: Mapping[str, Any]) -> list[str]:
        """A reward that has never said but one value; not if that is the best it can say: then all earned it."""
        only, num_rewards = stats.get("only_reward_so_far"), stats.get("rewards_so_far", 0)
        if only is None or only >= self._best_rewards.get(name, 1.0):
            return []
        self._constant_steps[name] += 1
        if num_rewards < ENOUGH_REWARDS or self._constant_steps[name] < ENOUGH_STEPS:
            return []
        return [f"{name}: all of its {num_rewards} rewards so far are {only:g}"]


def _about_samples(groups: Sequence[Group], limits: BatchConfig) -> list[str]:
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return []
    alarms = []
    truncated = sum(sample.completion.truncated for sample in samples) / len(samples)
    if truncated > limits.truncation_alarm:
        alarms.append(
            f"{truncated:.0%} of the completions were truncated (--max-generation-tokens is too short?)"
        )
    rewards = {sample.verdict.reward for sample in samples if sample.verdict.reward is not None}
    if len(rewards) == 1:
        alarms.append(f"every reward of the step is {rewards.pop():g}: there is nothing to learn from")
    return alarms


def _about_failures(name: str, stats: Mapping[str, Any], limits: BatchConfig) -> list[str]:
    calls = sum(stats.get(status, 0) for status in ("ok", "failed", "timed_out", "abstained"))
    failed = stats.get("failed", 0) + stats.get("timed_out", 0)
    if not calls or failed / calls <= limits.failure_alarm:
        return []
    return [f"{name}: {failed} of {calls} calls failed ({stats.get('first_reason') or 'no reason given'})"]
