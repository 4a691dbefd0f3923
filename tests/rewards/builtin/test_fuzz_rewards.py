"""A little of the fuzzing of `tests.long.fuzz_rewards`, and proof that it would notice."""

import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from fuzz_checkers import Arithmetic, judged, readings, solves
from fuzz_texts import countdown_cases, math_cases

from async_grpo.rewards.builtin import countdown
from tests.long import fuzz_rewards
from tests.long.fuzz_rewards import attack

ROOT = Path(__file__).parents[3]


def test_thousands_of_hostile_texts_neither_break_nor_fool_the_rewards():
    """In a process of its own: the audit hook that watches for executed text can never be removed."""
    options = "-W ignore -m tests.long.fuzz_rewards --countdown 2000 --math 60 --seed 7"
    command = [sys.executable, *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    lines = [line for line in done.stdout.splitlines() if " violations, " in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == 4 and all(" 0 violations, " in line for line in lines)
    assert all(int(line.split(" texts, ")[1].split()[0]) > 0 for line in lines)  # each accepted something


def violations(score, cases, count: int = 400) -> str:
    return "\n".join(attack(score, cases, count).violations)


def test_a_reward_that_forgets_a_rule_is_noticed():
    def careless(row):
        answer = row["completion"].rpartition("<answer>")[2].partition("</answer>")[0]
        try:
            value = countdown.value_of(countdown.parse_arithmetic(answer))  # any numbers will do
            return {"reward": float(value == row["target"])}
        except countdown.NOT_ARITHMETIC:
            return {"reward": 0.0}

    assert "accepted" in violations(careless, countdown_cases(random.Random(1)), 4000)


def test_a_reward_that_accepts_a_neighbour_is_noticed():
    def lenient(row):
        values = readings(row["completion"].rpartition("boxed{")[2].rpartition("}")[0])
        (gold,) = readings(row["answer"])
        return {"reward": float(any(abs(value - gold) <= 1 for value in values))}

    assert "accepted" in violations(lenient, math_cases(random.Random(1), Fraction(0)), 100)


def test_an_exception_and_executed_text_are_noticed(monkeypatch):
    def fragile(row):
        return {"reward": 1.0 / row["completion"].isascii()}

    def evaluates(row):
        fuzz_rewards.watch("compile", (row["completion"].encode(errors="replace"), "<string>"))
        return {"reward": 0.0}

    assert "ZeroDivisionError" in violations(fragile, countdown_cases(random.Random(1)))
    assert "executed" in violations(evaluates, countdown_cases(random.Random(1)))
    monkeypatch.setattr(fuzz_rewards, "LIMIT_S", 0.0)
    assert " s on " in violations(countdown.score, countdown_cases(random.Random(1)), 10)


def test_the_checkers_compute_and_say_when_they_cannot_tell():
    for text, value in {"1+2*3": 7, "10-4-3": 3, "-(2)--3": 1, "8/(3-8/3)": 24}.items():
        assert Arithmetic(text).value == value
    for text in ("", "1+", "(1", "1 2", "01", "1**2", "+1", "1.5", "٣", "1/0"):
        with pytest.raises((ValueError, ZeroDivisionError)):
            Arithmetic(text)
    assert solves("so</think>\n<answer>3+4</answer>", [4, 3], 7)
    assert not solves("<answer>3+4</answer><answer>3+4</answer>", [3, 4], 7) and not solves("3+4", [3, 4], 7)
    assert readings("1\\frac{1}{2}") == {Fraction(1, 2), Fraction(3, 2)}
    assert readings("x = -\\frac34\\text{ cm}") == {Fraction(-3, 4)} and readings("7x = 80") == set()
    assert judged("\\boxed{2}", Fraction(2), Fraction(0)) is True
    assert judged("\\boxed{3}", Fraction(2), Fraction(0)) is False
    assert judged("\\boxed{\\pi}", Fraction(2), Fraction(0)) is None


@pytest.mark.parametrize(
    ("adapter", "text", "gold"),
    [
        ("mathd", "7x = 80", "80"),
        ("mathd", "10 = 80", "80"),
        ("mathd", "5\\text{ or 6}", "5"),
        ("sympy", "7x = 80", "80"),
        ("sympy", "5\\text{ or }6", "5"),
        ("math_verify", "\u0663 -303.5", "-303.5"),  # an Arabic three
        ("math_verify", "1 2", "3"),
        ("math_verify", "-96 03", "-99"),
        ("math_verify", "5 \x00 52", "52"),
    ],
)
def test_what_fuzzing_found_stays_found(adapter, text, gold):
    score, _ = fuzz_rewards.MATH[adapter]
    assert score({"completion": f"$\\boxed{{{text}}}$", "answer": gold})["reward"] == 0.0


def test_an_unreadable_box_is_wrong_whatever_stands_around_it():
    score, _ = fuzz_rewards.MATH["math_verify"]
    for text in ("The answer is 5. $\\boxed{%%}$", "$5$ \\boxed{\\frac{-10}{2}\\%} 5"):
        assert score({"completion": text, "answer": "5"})["reward"] == 0.0, text
    for text in ("\\boxed{6} and $\\boxed{5}$", "\\boxed{6}, \\boxed{5}"):
        assert score({"completion": text, "answer": "\\{5, 6\\}"})["reward"] == 1.0, text
    assert score({"completion": "\\boxed{6}. No: $\\boxed{5}$", "answer": "5"})["reward"] == 1.0
