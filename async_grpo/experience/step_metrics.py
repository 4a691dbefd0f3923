"""The rollout side's numbers of one step or one evaluation, and what of them a user should look at.

Fractions are fractions (0 to 1), a mean of nothing is None (JSON null: no value is not a zero).
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from async_grpo.errors import RunFailed
from async_grpo.experience.config import BatchConfig
from async_grpo.metrics.alarms import repeated_endings
from async_grpo.metrics.spans import Interval, union
from async_grpo.types import Completion, Group, RewardStatus, Sample

ENOUGH_REWARDS, ENOUGH_STEPS = 50, 3  # of an adapter, before it is said to know one value only


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return float(np.mean(values)) if values else None


def reward_stats(samples: Sequence[Sample]) -> dict[str, Any]:
    """Rewards over the samples that have one, every component that adapters named, and the count of each status.

    `<adapter>/reward_std`: the standard deviation of an adapter's rewards; near 0 they tell no sample from another.
    """
    scored = [sample for sample in samples if sample.verdict.status is RewardStatus.OK]
    statuses = Counter(sample.verdict.status for sample in samples)
    components: dict[str, list[float]] = {}
    for sample in scored:
        for result in sample.verdict.results:
            for name, value in {"reward": result.reward, **result.extra}.items():
                if value is not None:
                    components.setdefault(f"{result.adapter}/{name}", []).append(value)
    return {
        "avg_reward": _mean(s.verdict.reward for s in scored if s.verdict.reward is not None),
        "num_reward_filled": sum(sample.verdict.filled for sample in samples),
        **{f"num_reward_{status.value}": statuses[status] for status in RewardStatus},
        **{name: _mean(values) for name, values in sorted(components.items())},
        **{f"{name}_std": float(np.std(of)) for name, of in components.items() if name.endswith("/reward")},
    }


def trajectory_stats(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of runs with an environment: means over trajectories of what their programs count, and `turn_tokens` of a turn."""
    played = [(sample, outcome) for sample in samples if (outcome := sample.completion.outcome) is not None]
    if not played:
        return {}
    turns = [turn for sample, _ in played for turn in sample.completion.turns]
    names = sorted({name for _, outcome in played for name in outcome.numbers})
    found = {name: _mean(o.numbers[name] for _, o in played if name in o.numbers) for name in names}
    return {
        "environment_failures": sum(bool(outcome.failure) for _, outcome in played),
        "turns": _mean(len(sample.completion.turns) for sample, _ in played),
        "turn_tokens": _mean(turn.tokens for turn in turns),
        "sequences": _mean(len(sample.sequences) for sample, _ in played),
        **{f"environment/{name}": value for name, value in found.items()},
    }


def refuse_unscored(step: int, groups: Sequence[Group]) -> None:
    """RunFailed, with the first reason, if nothing was scored: going on would train nothing and end "well"."""
    verdicts = [sample.verdict for group in groups for sample in group.samples]
    if not any(verdict.status is RewardStatus.OK for verdict in verdicts):
        reasons = [result.reason for verdict in verdicts for result in verdict.results if result.reason]
        raise RunFailed(
            f"not one of the {len(verdicts)} samples of step {step} could be scored; the first reason: "
            f"{reasons[0] if reasons else verdicts[0].status.value}"
        )


def step_stats(step: int, groups: Sequence[Group], total_samples: int, batch_steps: int) -> dict[str, Any]:
    """Rewards, lengths, and staleness: of a token the step minus the policy version that produced it."""
    samples = [sample for group in groups for sample in group.samples]
    trained = [sample for sample in samples if sample.advantages is not None]
    staleness = np.concatenate([step - sample.completion.versions for sample in samples])
    ages, tokens = np.unique(staleness, return_counts=True)
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
        "groups_too_small": sum(len(group.rewards) < 2 for group in groups),
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
        "staleness_tokens": dict(zip(map(str, ages.tolist()), tokens.tolist(), strict=True)),
        "batch_done": (step + 1) % batch_steps == 0,
    }


def readable_samples(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Every sample as one JSON-able row: prompt, completion, reward and why."""
    return [
        {
            "group": group.prompt.ordinal,
            "member": sample.completion.member,
            "input": group.prompt.row["input"],
            "completion": sample.completion.text,
            **_readable_turns(sample.completion),
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


def _readable_turns(completion: Completion) -> dict[str, Any]:
    """Return what was told and said in each turn of a trajectory, in time; nothing of a completion without turns."""
    turns = [completion.turns[place] for place in completion.turn_order]
    return {"turns": [[turn.said, turn.text] for turn in turns]} if turns else {}


class StepAlarms:
    """What goes wrong without an error, in words. It remembers for how many steps a reward has said one value only.

    `best_rewards`: the highest reward of an adapter by its name; 1 where none is given.
    """

    def __init__(self, limits: BatchConfig, best_rewards: Mapping[str, float] | None = None) -> None:
        self._limits, self._best_rewards = limits, best_rewards or {}
        self._constant_steps: Counter[str] = Counter()

    def of_step(self, groups: Sequence[Group], verifiers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """The alarms of the next step; `verifiers`: what its verifiers' `take_stats` says of it."""
        samples, alarms = [sample for group in groups for sample in group.samples], []
        truncated = sum(sample.completion.truncated for sample in samples) / max(len(samples), 1)
        if truncated > self._limits.truncation_alarm:
            hint = "--max-generation-tokens is too short?"
            alarms.append(f"{truncated:.0%} of the completions were truncated ({hint})")
        rewards = {sample.verdict.reward for sample in samples} - {None}
        if len(rewards) == 1:
            alarms.append(f"every reward of the step is {rewards.pop():g}: there is nothing to learn from")
        for name, stats in verifiers.items():
            calls = sum(stats.get(status.value, 0) for status in RewardStatus)
            failed = stats.get("failed", 0) + stats.get("timed_out", 0)
            if calls and failed / calls > self._limits.failure_alarm:
                reason = stats.get("first_reason") or "no reason given"
                alarms.append(f"{name}: {failed} of {calls} calls failed ({reason})")
            if self._is_constant(name, stats):
                said, only = stats["rewards_so_far"], stats["only_reward_so_far"]
                alarms.append(f"{name}: all of its {said} rewards so far are {only:g}")
            if opened := stats.get("breakers_opened", 0):
                alarms.append(f"{name}: a server of it went out of service {opened} time(s)")
        return alarms

    def _is_constant(self, name: str, stats: Mapping[str, Any]) -> bool:
        """It has never said but one value; not if that is the best it can say: then all earned it."""
        only = stats.get("only_reward_so_far")
        best = self._best_rewards.get(name.removesuffix(" (evaluation)"), 1.0)
        if only is None or only >= best:
            return False
        self._constant_steps[name] += 1
        enough = stats.get("rewards_so_far", 0) >= ENOUGH_REWARDS
        return enough and self._constant_steps[name] >= ENOUGH_STEPS


class EngineUtilization:
    """Notes when the engines may work: a slot is free, or admitted sequences are unfinished."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._since, self._is_allowed = clock, clock(), True
        self._seconds = {True: 0.0, False: 0.0}  # allowed, and not

    def set(self, *, sequences: int, free_slots: int) -> None:
        """The state from now on."""
        now = self._clock()
        self._seconds[self._is_allowed] += now - self._since
        self._since, self._is_allowed = now, bool(sequences or free_slots)

    def take(self, busy: Sequence[Interval] = ()) -> dict[str, float]:
        """Seconds since the last call; `busy`: when any engine held at least one unfinished request."""
        self.set(sequences=int(self._is_allowed), free_slots=0)
        allowed_s, barred_s = self._seconds.values()
        busy_s = sum(end - begin for begin, end in union(busy))
        self._seconds = {True: 0.0, False: 0.0}
        return {
            "engine_busy_s": min(busy_s, allowed_s),  # an engine may report late, or by another clock
            "engine_allowed_s": allowed_s,
            "wait_generation_budget_s": barred_s,
        }
