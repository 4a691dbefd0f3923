"""The rollout side's numbers of one step or one evaluation, from its groups. Fractions are fractions (0 to 1)."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from async_grpo.errors import RunFailed
from async_grpo.experience.groups import num_scored
from async_grpo.types import Group, RewardStatus, Sample


def mean(values: Iterable[float]) -> float | None:
    """The mean, or None of nothing (JSON null: no value is not a zero)."""
    values = list(values)
    return float(np.mean(values)) if values else None


def reward_stats(samples: Sequence[Sample]) -> dict[str, Any]:
    """Rewards over the samples that have one, every component that adapters named, and the count of each status."""
    scored = [sample for sample in samples if sample.verdict.status is RewardStatus.OK]
    statuses = Counter(sample.verdict.status for sample in samples)
    components: dict[str, list[float]] = {}
    for sample in scored:
        for result in sample.verdict.results:
            for name, value in {"reward": result.reward, **result.extra}.items():
                if value is not None:
                    components.setdefault(f"{result.adapter}/{name}", []).append(value)
    return {
        "avg_reward": mean(s.verdict.reward for s in scored if s.verdict.reward is not None),
        "num_reward_filled": sum(sample.verdict.filled for sample in samples),
        **{f"num_reward_{status.value}": statuses[status] for status in RewardStatus},
        **{name: mean(values) for name, values in sorted(components.items())},
    }


def refuse_unscored(step: int, groups: Sequence[Group]) -> None:
    """A whole step without a single reward is no accident: going on would train nothing and end "well".

    Raises:
        RunFailed: with the first reason that an adapter gave.
    """
    verdicts = [sample.verdict for group in groups for sample in group.samples]
    if not any(verdict.status is RewardStatus.OK for verdict in verdicts):
        reasons = [result.reason for verdict in verdicts for result in verdict.results if result.reason]
        raise RunFailed(
            f"not one of the {len(verdicts)} samples of step {step} could be scored; the first reason: "
            f"{reasons[0] if reasons else verdicts[0].status.value}"
        )


def step_stats(
    step: int, groups: Sequence[Group], total_samples: int, steps_per_batch: int
) -> dict[str, Any]:
    """The keys of the prior library that the rollout side knows, and staleness.

    Staleness of a token is the step minus the policy version that produced it.
    """
    samples = [sample for group in groups for sample in group.samples]
    trained = [sample for sample in samples if sample.advantages is not None]
    staleness = np.concatenate([step - sample.completion.versions for sample in samples])
    return {
        "iteration": step // steps_per_batch,
        "total_samples_accumulated": total_samples,
        "samples_in_batch": len(samples),
        "samples_trained": len(trained),
        **reward_stats(samples),
        "avg_output_tokens": mean(len(sample.completion) for sample in samples),
        "avg_max_reward_in_group": mean(_best_rewards(groups)),
        "groups_too_small": sum(num_scored(group) < 2 for group in groups),
        "prompts_resampled": sum(group.resampled for group in groups),
        "perc_with_0_advantage": mean(float(not np.any(sample.advantages)) for sample in trained),
        "perc_truncated_samples": mean(sample.completion.truncated for sample in samples),
        "num_modified_samples": 0,
        "avg_modified_reward": None,
        "avg_non_modified_reward": reward_stats(samples)["avg_reward"],
        "avg_delimiter_not_found": None,
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "staleness_fraction": float((staleness > 0).mean()),
        "batch_done": (step + 1) % steps_per_batch == 0,
    }


def _best_rewards(groups: Sequence[Group]) -> Iterable[float]:
    for group in groups:
        rewards = [sample.verdict.reward for sample in group.samples if sample.verdict.reward is not None]
        if rewards:
            yield max(rewards)


def readable_samples(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Every sample as one JSON-able row: prompt, completion, reward and why."""
    return [
        {
            "group": group.prompt.ordinal,
            "input": group.prompt.row["input"],
            "completion": sample.completion.text,
            "answer": group.prompt.row.get("answer"),
            "reward": sample.verdict.reward,
            "status": sample.verdict.status.value,
            "components": {
                result.adapter: {"reward": result.reward, **result.extra} for result in sample.verdict.results
            },
            "reason": "; ".join(result.reason for result in sample.verdict.results if result.reason),
            "finish_reason": sample.completion.finish_reason.value,
            "oldest_version": sample.completion.oldest_version,
            "advantage": None if sample.advantages is None else float(sample.advantages[-1]),
        }
        for group in groups
        for sample in group.samples
    ]
