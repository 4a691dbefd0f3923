"""What somebody should look at, in words: numbers that go wrong without an error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.types import Group

ENOUGH = 50  # rewards of an adapter before it is said to know one value only


@dataclass(frozen=True)
class AlarmLimits:
    """Shares above which there is an alarm."""

    truncated: float = 1.0
    failed: float = 1.0


def step_alarms(
    groups: Sequence[Group], verifiers: Mapping[str, Mapping[str, Any]], limits: AlarmLimits
) -> list[str]:
    """The alarms of one step; usually none.

    Args:
        verifiers: `VerifierPool.stats` of the step.

    >>> step_alarms([], {"judge": {"ok": 1, "failed": 3, "first_reason": "HTTP 500"}}, AlarmLimits(failed=0.1))
    ['judge: 3 of 4 calls failed (HTTP 500)']
    """
    return [*_about_samples(groups, limits), *_about_verifiers(verifiers, limits)]


def _about_samples(groups: Sequence[Group], limits: AlarmLimits) -> list[str]:
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return []
    alarms = []
    truncated = sum(sample.completion.truncated for sample in samples) / len(samples)
    if truncated > limits.truncated:
        alarms.append(
            f"{truncated:.0%} of the completions were truncated (--max-generation-tokens is too short?)"
        )
    rewards = {sample.verdict.reward for sample in samples if sample.verdict.reward is not None}
    if len(rewards) == 1:
        alarms.append(f"every reward of the step is {rewards.pop():g}: there is nothing to learn from")
    return alarms


def _about_verifiers(verifiers: Mapping[str, Mapping[str, Any]], limits: AlarmLimits) -> list[str]:
    alarms = []
    for name, stats in verifiers.items():
        calls = sum(stats.get(status, 0) for status in ("ok", "failed", "timed_out", "abstained"))
        failed = stats.get("failed", 0) + stats.get("timed_out", 0)
        if calls and failed / calls > limits.failed:
            alarms.append(
                f"{name}: {failed} of {calls} calls failed ({stats.get('first_reason') or 'no reason given'})"
            )
        only = stats.get("only_reward_so_far")
        if only is not None and stats.get("rewards_so_far", 0) >= ENOUGH:
            alarms.append(f"{name}: all of its {stats['rewards_so_far']} rewards so far are {only:g}")
    return alarms
