"""The metrics of one step or one evaluation on the rollout side, and the alarms about them.

Fractions are between 0 and 1. The mean of an empty list is None (JSON null) because a missing value is not a zero.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from async_grpo.errors import RunFailed
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.plain_values import data_url
from async_grpo.experience.run_images import images_of
from async_grpo.metrics.alarms import repeated_endings
from async_grpo.metrics.free_numbers import IGNORED_PREFIX
from async_grpo.metrics.spans import Interval, union
from async_grpo.types import Completion, Group, Outcome, RewardStatus, Sample

# An adapter is reported as constant if all of its rewards are equal after at least this many rewards and steps
ENOUGH_REWARDS = 50
ENOUGH_STEPS = 3
MAX_KIND_CHARACTERS = 60  # maximum length of an error's name that becomes part of a metric key
SHOWN_CHARACTERS = 300  # maximum length of the reason that the alarm about failed trajectories shows


def _mean(values: Iterable[float]) -> float | None:
    """Return the mean, or None if there are no values."""
    values = list(values)
    return float(np.mean(values)) if values else None


def reward_stats(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the mean reward of the scored samples, the mean of each adapter's numbers, and the count of each status.

    `<adapter>/reward_std` is the standard deviation of an adapter's rewards. If it is near 0, the adapter does not
    distinguish samples.
    """
    scored = [sample for sample in samples if sample.verdict.status is RewardStatus.OK]
    statuses = Counter(sample.verdict.status for sample in samples)
    components: dict[str, list[float]] = {}
    for sample in scored:
        for result in sample.verdict.results:
            for name, value in {"reward": result.reward, **result.extra}.items():
                if value is not None:
                    components.setdefault(f"{result.adapter}/{name}", []).append(value)
    stats: dict[str, Any] = {
        "avg_reward": _mean(s.verdict.reward for s in scored if s.verdict.reward is not None),
        "num_reward_filled": sum(sample.verdict.filled for sample in samples),
    }
    for status in RewardStatus:
        stats[f"num_reward_{status.value}"] = statuses[status]
    for name, values in sorted(components.items()):
        stats[name] = _mean(values)
    for name, values in components.items():
        if name.endswith("/reward"):
            stats[f"{name}_std"] = float(np.std(values))
    return stats


def trajectory_stats(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return statistics of the trajectories of a run with an environment, or {} for other runs.

    They have the mean number of turns and sequences per trajectory, of sampled tokens per turn, and the mean of each
    number that the environments report. Failed trajectories and requests with ignored fields are counted.
    """
    trajectories = [sample.completion for sample in samples if sample.completion.outcome is not None]
    if not trajectories:
        return {}
    outcomes = [completion.outcome for completion in trajectories if completion.outcome is not None]
    turns = [turn for completion in trajectories for turn in completion.turns]
    num_sequences = [len(sample.sequences) for sample in samples if sample.completion.outcome is not None]
    stats: dict[str, Any] = {
        "environment_failures": sum(bool(outcome.failure) for outcome in outcomes),
        **_failures_by_kind(outcomes),
        "turns": _mean(len(completion.turns) for completion in trajectories),
        "turn_tokens": _mean(turn.num_tokens for turn in turns),
        "sequences": _mean(num_sequences),
    }
    for name in sorted(set[str]().union(*(outcome.numbers for outcome in outcomes))):
        values = [outcome.numbers[name] for outcome in outcomes if name in outcome.numbers]
        is_count = name.startswith(IGNORED_PREFIX)
        stats[f"environment/{name}"] = sum(values) if is_count else _mean(values)
    return stats


def _failures_by_kind(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return the number of failed trajectories for each kind of error. A key is like `environment_failures/AgentFailed`."""
    counts: dict[str, int] = {}
    for outcome in outcomes:
        kind = outcome.failure.partition(":")[0]
        if outcome.failure and kind.isidentifier() and len(kind) <= MAX_KIND_CHARACTERS:
            key = f"environment_failures/{kind}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def refuse_unscored(step: int, groups: Sequence[Group]) -> None:
    """Check that at least one sample of a step was scored.

    Without this check, a run whose rewards all fail would train nothing and seem to succeed.

    Raises:
        RunFailed: No sample was scored; the message contains the first reason.
    """
    verdicts = [sample.verdict for group in groups for sample in group.samples]
    if not any(verdict.status is RewardStatus.OK for verdict in verdicts):
        reasons = [result.reason for verdict in verdicts for result in verdict.results if result.reason]
        raise RunFailed(
            f"not one of the {len(verdicts)} samples of step {step} could be scored; the first reason: "
            f"{reasons[0] if reasons else verdicts[0].status.value}"
        )


def step_stats(step: int, groups: Sequence[Group], total_samples: int, batch_steps: int) -> dict[str, Any]:
    """Return the metrics of a step: rewards, lengths, and staleness.

    The staleness of a token is the step minus the policy version that sampled it.

    Args:
        step: The first step that trains the groups.
        groups: The groups of the step.
        total_samples: Number of samples of all steps so far, including this one.
        batch_steps: Number of steps per iteration.
    """
    samples = [sample for group in groups for sample in group.samples]
    trained = [sample for sample in samples if sample.advantages is not None]
    staleness = np.concatenate([step - sample.completion.versions for sample in samples])
    ages, num_tokens = np.unique(staleness, return_counts=True)
    rewards = reward_stats(samples)
    return {
        "iteration": step // batch_steps,
        "total_samples_accumulated": total_samples,
        "samples_in_batch": len(samples),
        "samples_trained": len(trained),
        **rewards,
        **trajectory_stats(samples),
        "avg_output_tokens": _mean(len(sample.completion) for sample in samples),
        "avg_max_reward_in_group": _mean(max(group.rewards) for group in groups if group.rewards),
        "groups_too_small": sum(len(group.rewards) < min(2, len(group.samples)) for group in groups),
        "prompts_resampled": sum(group.resampled for group in groups),
        "perc_with_0_advantage": _mean(float(not np.any(sample.advantages)) for sample in trained),
        "perc_truncated_samples": _mean(sample.completion.truncated for sample in samples),
        "repeated_endings": repeated_endings((s.prompt.row.get("input"), s.completion.text) for s in samples),
        "num_modified_samples": 0,
        "avg_modified_reward": None,
        "avg_non_modified_reward": rewards["avg_reward"],
        "avg_delimiter_not_found": None,
        "staleness_mean": float(staleness.mean()),
        "staleness_max": int(staleness.max()),
        "staleness_fraction": float((staleness > 0).mean()),
        "staleness_tokens": dict(zip(map(str, ages.tolist()), num_tokens.tolist(), strict=True)),
        "batch_done": (step + 1) % batch_steps == 0,
    }


def lacks_teacher(sample: Sample) -> bool:
    """Return whether the sample has tokens, and its teacher gave a log-prob for none of them."""
    logprobs = sample.teacher_logprobs
    return logprobs is not None and len(logprobs) > 0 and not np.isfinite(logprobs).any()


def groups_to_show(config: BatchConfig, groups: Sequence[Group]) -> Sequence[Group]:
    """Return the groups of a step whose samples are written to a file."""
    if config.dump_samples_filename:
        return groups
    in_order = sorted(groups, key=lambda group: group.prompt.ordinal)
    return in_order[: config.keep_sample_groups]


def readable_samples(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return one JSON row per sample with its prompt, completion, reward and the reasons of the reward."""
    return [_readable_sample(group, sample) for group in groups for sample in group.samples]


def _readable_sample(group: Group, sample: Sample) -> dict[str, Any]:
    """Return a sample as a JSON row."""
    completion = sample.completion
    results = sample.verdict.results
    ordinal = group.prompt.ordinal
    row: dict[str, Any] = {
        # Question n of an evaluation has the ordinal -1 - n
        "group": ordinal if ordinal >= 0 else -1 - ordinal,
        "member": completion.member,
        "input": group.prompt.row["input"],
        "completion": completion.text,
    }
    images = images_of(sample)
    if images:
        digests = [image.digest for image in images]
        # An image that begins several sequences of a trajectory is shown once
        row["images"] = list(dict.fromkeys(digests)) if completion.turns else digests
    if completion.picture_png:
        row["picture"] = data_url(completion.picture_png, "image/png")
    if completion.turns:
        row["turns"] = _readable_turns(completion)
    if completion.abandoned:
        # Numbers count all turns of the trajectory from 1, the abandoned ones included
        row["abandoned_turns"] = [
            {"number": turn.number + 1, "read": turn.before_text, "said": turn.text}
            for turn in completion.abandoned
        ]
    row["answer"] = group.prompt.row.get("answer")
    row["reward"] = sample.verdict.reward
    row["status"] = sample.verdict.status.value
    row["components"] = {result.adapter: {"reward": result.reward, **result.extra} for result in results}
    row["reason"] = "; ".join(result.reason for result in results if result.reason)
    row["finish_reason"] = completion.finish_reason.value
    row["oldest_version"] = completion.oldest_version
    row["advantage"] = None if sample.advantages is None else float(sample.advantages[-1])
    return row


def _readable_turns(completion: Completion) -> list[list[str]]:
    """Return [text that the policy read, text that it sampled] for each turn of a trajectory, in time order."""
    turns = [completion.turns[place] for place in completion.turn_order]
    return [[turn.before_text, turn.text] for turn in turns]


class StepAlarms:
    """Describes problems that raise no error, such as truncated completions, failing verifiers and constant rewards.

    Args:
        limits: The options, which set the shares above which there is an alarm.
        best_rewards: The highest possible reward of each adapter, by name. The default for an adapter is 1.
    """

    def __init__(self, limits: BatchConfig, best_rewards: Mapping[str, float] | None = None) -> None:
        self._limits = limits
        self._best_rewards = best_rewards or {}
        self._constant_steps: Counter[str] = Counter()

    def of_step(self, groups: Sequence[Group], verifiers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return the alarms of a step. Call this once per step, in order.

        Args:
            groups: The groups of the step.
            verifiers: Statistics of each verifier, by name: the entry `verifiers` of `Verification.take_stats`.
        """
        alarms = self._of_samples([sample for group in groups for sample in group.samples])
        for name, stats in verifiers.items():
            alarms += self._of_verifier(name, stats)
        return alarms

    def _of_samples(self, samples: Sequence[Sample]) -> list[str]:
        """Return the alarms about truncated completions, failed trajectories and equal rewards."""
        alarms = []
        truncated_share = sum(sample.completion.truncated for sample in samples) / max(len(samples), 1)
        if truncated_share > self._limits.truncation_alarm:
            alarms.append(
                f"{truncated_share:.0%} of the completions were truncated (--max-generation-tokens is too short?)"
            )
        failures = [sample.completion.failure for sample in samples if sample.completion.failure]
        if samples and len(failures) / len(samples) > self._limits.failure_alarm:
            first_line = failures[0].partition("\n")[0]
            alarms.append(
                f"environment: {len(failures)} of {len(samples)} trajectories failed ({first_line[:SHOWN_CHARACTERS]})"
            )
        num_untaught = sum(map(lacks_teacher, samples))
        if samples and num_untaught / len(samples) > self._limits.failure_alarm:
            alarms.append(f"the teacher gave no log-probs for {num_untaught} of {len(samples)} samples")
        rewards = {sample.verdict.reward for sample in samples} - {None}
        if len(rewards) == 1:
            alarms.append(f"every reward of the step is {rewards.pop():g}: there is nothing to learn from")
        return alarms

    def _of_verifier(self, name: str, stats: Mapping[str, Any]) -> list[str]:
        """Return the alarms about one verifier."""
        alarms = []
        num_calls = sum(stats.get(status.value, 0) for status in RewardStatus)
        num_failed = stats.get("failed", 0) + stats.get("timed_out", 0)
        if num_calls and num_failed / num_calls > self._limits.failure_alarm:
            reason = stats.get("first_reason") or "no reason given"
            alarms.append(f"{name}: {num_failed} of {num_calls} calls failed ({reason})")
        if self._is_constant(name, stats):
            num_rewards = stats["rewards_so_far"]
            alarms.append(
                f"{name}: all of its {num_rewards} rewards so far are {stats['only_reward_so_far']:g}"
            )
        num_opened = stats.get("breakers_opened", 0)
        if num_opened:
            alarms.append(f"{name}: a server of it went out of service {num_opened} time(s)")
        return alarms

    def _is_constant(self, name: str, stats: Mapping[str, Any]) -> bool:
        """Return whether all rewards of a verifier so far are equal and below its best reward.

        The result is False until there are `ENOUGH_REWARDS` rewards in `ENOUGH_STEPS` steps. Call this once per step and
        verifier: each call counts as a step.
        """
        only_reward = stats.get("only_reward_so_far")
        best_reward = self._best_rewards.get(name.removesuffix(" (evaluation)"), 1.0)
        if only_reward is None or only_reward >= best_reward:
            return False
        self._constant_steps[name] += 1
        has_enough_rewards = stats.get("rewards_so_far", 0) >= ENOUGH_REWARDS
        return has_enough_rewards and self._constant_steps[name] >= ENOUGH_STEPS


class EngineUtilization:
    """Measures for how many seconds the engines were allowed to work, and for how many they had to wait.

    Engines may work while a slot of the staleness budget is free, or while admitted sequences are unfinished.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._since = clock()
        self._is_allowed = True
        # seconds in which the engines may (True) or may not (False) work
        self._seconds = {True: 0.0, False: 0.0}

    def set(self, *, sequences: int, free_slots: int) -> None:
        """Record the numbers of unfinished sequences and free slots, which are valid from now on."""
        now = self._clock()
        self._seconds[self._is_allowed] += now - self._since
        self._since = now
        self._is_allowed = bool(sequences or free_slots)

    def take(self, busy: Sequence[Interval] = ()) -> dict[str, float]:
        """Return for how many seconds since the last call the engines were busy, allowed to work, and not allowed to.

        Args:
            busy: The intervals in which any engine had an unfinished request.
        """
        self.set(sequences=int(self._is_allowed), free_slots=0)
        allowed_s = self._seconds[True]
        not_allowed_s = self._seconds[False]
        busy_s = sum(end - begin for begin, end in union(busy))
        self._seconds = {True: 0.0, False: 0.0}
        return {
            # limited, because an engine may report late or its clock may differ
            "engine_busy_s": min(busy_s, allowed_s),
            "engine_allowed_s": allowed_s,
            "wait_generation_budget_s": not_allowed_s,
        }
