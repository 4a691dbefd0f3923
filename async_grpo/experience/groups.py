"""One finished group: what its verifiers see, and whether there is anything to learn from it."""

from typing import Any

from async_grpo.types import Completion, Group, Prompt, RewardStatus, Verdict


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


def earned(verdict: Verdict, *, apart: bool) -> Any:
    """What two verdicts are compared by.

    Args:
        apart: what each adapter said counts by itself, and process rewards step by step: two samples of one total may
            have earned it in different places.
    """
    return tuple((r.adapter, r.reward, r.steps) for r in verdict.results) if apart else verdict.reward


def all_ok(verdict: Verdict) -> bool:
    """Whether there are results, and every adapter gave a reward."""
    return {result.status for result in verdict.results} == {RewardStatus.OK}


def num_scored(group: Group) -> int:
    """How many of its samples have a reward."""
    return sum(sample.verdict.status is RewardStatus.OK for sample in group.samples)


def mean_reward(group: Group) -> float | None:
    """Of the samples that have one; None if none has."""
    rewards = [sample.verdict.reward for sample in group.samples if sample.verdict.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
