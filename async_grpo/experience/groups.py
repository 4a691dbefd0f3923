"""One finished group: what its verifiers see, and what becomes of a reward that could not be had: no silent zero.

By the adapter that failed (`--on-reward-failure`) it masks its sample (the default), `group_mean` gives the sample the
mean reward of its group, and `refill` drops the group for another prompt (a constant is the combination's matter).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from async_grpo.types import Completion, Group, Prompt, RewardStatus, Verdict

LOST = (RewardStatus.FAILED, RewardStatus.TIMED_OUT)


def reward_sample(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """What a reward adapter receives: every column of the row, and the completion."""
    sample = {
        **{key: value for key, value in prompt.row.items() if key != "input_token_ids"},
        "completion": completion.text,
        "sample_text": prompt.row["input"] + completion.text,
        "completion_token_ids": completion.token_ids.tolist(),
        "truncated": completion.truncated,
        "group_id": prompt.ordinal,
    }
    if completion.char_ends is not None:
        sample["completion_char_ends"] = completion.char_ends.tolist()
    return sample


def mean_reward(group: Group, min_valid: int) -> float | None:
    """Of the samples that have one; None if they are fewer than `min_valid` (or none at all)."""
    rewards = group.rewards
    return sum(rewards) / len(rewards) if len(rewards) >= max(min_valid, 1) else None


def wants_refill(group: Group, policies: Mapping[str, str]) -> bool:
    """Whether one of its failures asks for another group in its place."""
    verdicts = [group.baseline, *(sample.verdict for sample in group.samples)]
    culprits = {culprit for verdict in verdicts if verdict is not None for culprit in _culprits(verdict)}
    return any(policies.get(culprit) == "refill" for culprit in culprits)


def with_group_mean(group: Group, policies: Mapping[str, str], min_valid: int) -> Group:
    """The group with its mean reward where all failures of a sample ask for it, if `min_valid` others have one."""
    mean = mean_reward(group, min_valid)
    if mean is None or "group_mean" not in policies.values():
        return group
    samples = []
    for sample in group.samples:
        verdict = sample.verdict
        blamed = {policies.get(culprit) for culprit in _culprits(verdict)}
        if blamed == {"group_mean"} and verdict.status in LOST:
            verdict = Verdict(RewardStatus.OK, mean, verdict.results, filled=True)
        samples.append(replace(sample, verdict=verdict))
    return replace(group, samples=tuple(samples))


def _culprits(verdict: Verdict) -> Iterator[str]:
    """The adapters that failed."""
    return (result.adapter for result in verdict.results if result.status in LOST)
