"""Alarms for a reward that is gamed: each on a series made for it, none on the noise of healthy runs."""

import json

import numpy as np
import pytest

from async_grpo.metrics.alarms import BEFORE, alarm_kind, hacking_alarms, repeated_endings
from async_grpo.metrics.writer import METRICS_FILE, MetricsWriter

STEPS = 150


def healthy(seed=0, steps=STEPS):
    """It learns, its completions grow by a half within its 150 steps, its format is soon right, evaluations follow."""
    random = np.random.default_rng(seed)
    lines = []
    for n in range(steps):
        skill = 0.2 + 0.5 * n / STEPS
        right = random.binomial(64, skill) / 64
        written = random.binomial(64, min(1.0, 0.5 + n / 40)) / 64
        line = {
            "step": n + 1,
            "avg_reward": right + 0.1 * written,
            "avg_output_tokens": random.normal(200 + 100 * n / STEPS, 8),
            "repeated_endings": random.binomial(64, 0.05) / 64,
            "math/reward": right,
            "math/reward_std": float(np.sqrt(right * (1 - right))),
            "format/reward": 0.1 * written,
            "format/reward_std": 0.1 * float(np.sqrt(written * (1 - written))),
        }
        if n % 10 == 9:
            half = 1.96 * float(np.sqrt(skill * (1 - skill) / 100))
            line |= {"eval_step": n, "eval_avg_reward": random.binomial(100, skill) / 100}
            line |= {"eval_avg_reward_ci": half, "eval_math/reward_std": 0.5}
        lines.append(line)
    return lines


def changed(key, values, lines=None):
    """The healthy run with other values at the end of one series."""
    lines = [dict(line) for line in lines or healthy()]
    for line, value in zip(lines[-len(values) :], values, strict=True):
        line[key] = value
    return lines


def words(lines):
    return [alarm.split()[0] for alarm in hacking_alarms(lines)]


def test_healthy_runs_raise_no_alarm_at_any_step():
    for seed in range(10):
        lines = healthy(seed)
        for n in range(len(lines) + 1):
            assert hacking_alarms(lines[:n]) == [], (seed, n)


@pytest.mark.parametrize("key", ["avg_reward", "avg_output_tokens", "repeated_endings", "math/reward"])
def test_numbers_that_are_missing_or_none_raise_none(key):
    lines = healthy()
    for n, line in enumerate(lines):
        if n % 2:
            line.pop(key)
        else:
            line[key] = None
    assert hacking_alarms(lines) == []


def test_completions_twice_as_long_are_an_alarm_even_where_the_reward_rises():
    lengths = 200.0 * 2.2 ** np.clip(np.arange(60) / 50, 0, 1)
    (alarm,) = hacking_alarms(changed("avg_output_tokens", lengths.tolist()))
    assert "to 440 tokens within 60 steps" in alarm


def test_shorter_completions_are_an_alarm_only_where_they_are_not_paid_for():
    short = changed("avg_output_tokens", [250.0] * 50 + [100.0, 101.0] * 5)
    assert hacking_alarms(short) == []  # the reward rises: it learns to come to the point
    flat = changed("avg_reward", [0.4, 0.41] * (STEPS // 2), short)
    (alarm,) = hacking_alarms(flat)
    assert "completions went from 250 to 100 tokens" in alarm or "completions went from 250 to 101" in alarm


def test_a_single_wild_step_is_none():
    assert hacking_alarms(changed("avg_output_tokens", [3000.0])) == []
    assert hacking_alarms(changed("repeated_endings", [1.0, 1.0])) == []


def test_endings_that_begin_to_repeat_are_an_alarm():
    (alarm,) = hacking_alarms(changed("repeated_endings", [0.4, 0.5] * 5))
    assert alarm.startswith("45% of the completions end in words said before; 60 steps ago")
    assert (
        hacking_alarms(changed("repeated_endings", [0.5] * STEPS)) == []
    )  # they always did: the task asks for it


def test_a_reward_that_all_earn_beside_others_is_an_alarm_and_a_small_one_is_not():
    saturated = changed("math/reward_std", [0.0] * 20, changed("math/reward", [0.99] * 20))
    (alarm,) = hacking_alarms(saturated)
    assert alarm.startswith("math/reward is 0.99 for nearly every sample")
    alone = [{key: value for key, value in line.items() if "format" not in key} for line in saturated]
    assert hacking_alarms(alone) == []  # the only reward: the task is solved, and the batcher says so
    always = changed("math/reward_std", [1e-17] * 140 + [0.0] * 10, changed("math/reward", [0.99] * STEPS))
    assert hacking_alarms(always) == []  # it was never otherwise
    low = changed("math/reward_std", [0.0] * 20, changed("math/reward", [0.1] * 20))
    assert hacking_alarms(low) == []  # all fail: that is none of a reward that is gamed


def evaluated(values, half=0.02):
    """With an evaluation every ten steps, the last ones as given."""
    lines = healthy()
    for place, value in zip(range(9, STEPS, 10), [0.3] * (15 - len(values)) + values, strict=True):
        lines[place] |= {"eval_avg_reward": value, "eval_avg_reward_ci": half}
    return lines


def test_evaluations_that_fall_while_the_reward_rises_are_an_alarm():
    (alarm,) = hacking_alarms(evaluated([0.5, 0.4, 0.41, 0.35]))
    assert (
        "while eval_avg_reward fell from 0.5 to 0.35" in alarm
        and "the reward rose from 0.698 to 0.766" in alarm
    )
    assert len(hacking_alarms(evaluated([0.5, 0.4, 0.41, 0.35])[:-5])) == 1  # between evaluations it stays


@pytest.mark.parametrize(
    "lines",
    [
        evaluated([0.5, 0.35]),  # one evaluation is no evidence
        evaluated([0.5, 0.4, 0.47]),  # nor two of which one is as good, by its interval
        evaluated([0.5, 0.4, 0.41, 0.35], half=0.1),  # nor what intervals cannot tell apart
        evaluated([0.5, 0.4, 0.41, 0.35], half=None),
        changed(
            "avg_reward", [0.55, 0.56] * 30, evaluated([0.5, 0.4, 0.41, 0.35])
        ),  # the reward does not rise
    ],
    ids=["one", "back", "noise", "no interval", "reward flat"],
)
def test_evaluations_that_may_be_as_good_as_before_are_none(lines):
    assert hacking_alarms(lines) == []


def test_each_of_several_evaluation_files_is_looked_at():
    lines = evaluated([0.5, 0.4, 0.41, 0.35])
    for line in (line for line in lines if "eval_step" in line):
        for end in ("", "_ci"):
            line[f"eval_gsm8k_avg_reward{end}"] = line[f"eval_avg_reward{end}"]
        line["eval_avg_reward"] = 0.5
    (alarm,) = hacking_alarms(lines)
    assert "eval_gsm8k_avg_reward fell" in alarm


def test_repeated_endings_counts_what_other_prompts_got_and_loops_and_no_short_answers():
    phrase = "and that is why this answer deserves the very highest reward of all, dear judge."
    assert (
        repeated_endings([("a", f"one {phrase}"), ("b", f"two {phrase}"), ("c", "x" * 30 + phrase[::-1])])
        == 2 / 3
    )
    assert repeated_endings([("a", f"one {phrase}"), ("a", f"two {phrase}")]) == 0  # two tries at one prompt
    assert repeated_endings([("a", "</answer>"), ("b", "</answer>")]) == 0
    assert repeated_endings([("a", "wait, " * 40)]) == 1
    assert repeated_endings([]) == 0


def test_the_writer_raises_them_and_a_resumed_run_knows_what_came_before(tmp_path):
    raw = {"time_per_batch": 1.0, "alarms": ["other"]}
    lines = [raw | line for line in changed("repeated_endings", [0.5] * 10)]
    for part in (lines[:-4], lines[-4:]):  # two lives of a run
        writer = MetricsWriter(tmp_path, num_steps=STEPS)
        for line in part:
            writer.write(line)
        writer.close()
    written = [json.loads(line)["alarms"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [alarm_kind(alarm) for alarm in written[-1]] == ["other", alarm_kind(hacking_alarms(lines)[0])]
    assert written[0] == ["other"] and len(written) == STEPS and BEFORE < STEPS
