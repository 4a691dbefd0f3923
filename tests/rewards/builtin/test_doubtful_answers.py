"""Answers that hedge, deny their value or state a bound are wrong. Answers beside them that look alike stay right."""

import pytest

from async_grpo.rewards.answer_reading.choices import choice_with_value
from async_grpo.rewards.builtin.math_verify import score as math_verify
from async_grpo.rewards.builtin.mathd import score as mathd
from async_grpo.rewards.builtin.sympy import score as sympy
from async_grpo.rewards.builtin.text import exact

REWARDS = {"math_verify": math_verify, "mathd": mathd, "sympy": sympy}


def reward_of(reward, gold: object, completion: str) -> float:
    return reward({"completion": completion, "answer": gold})["reward"]


@pytest.mark.parametrize("reward", [*REWARDS.values(), exact], ids=[*REWARDS, "exact"])
@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        ("B", "(B) 12 or (C) 13", False),
        ("B", "(B) 12, (C) 13, (D) 14", False),
        ("B", "(B) or (C)", False),
        ("B", "(B) maybe C", False),
        ("B", "B. 12 or C. 13", False),
        ("B", r"(B) \text{ or } (C)", False),
        ("B", "(B) 12", True),
        ("B", r"\textbf{(B) }12", True),
        ("B", "(B) 12 or 13", True),
        ("B", r"\text{(B) } 2 P(A) = 3", True),
        ("B", "B. 12 cm", True),
        ("B", r"(B) \angle A. Then", True),
        ("B", "B) 12 C) 13", False),
        ("(B) 12 or (C) 13", "(B) 12 or (C) 13", True),
    ],
)
def test_two_choices_are_no_choice(reward, gold, answer, is_right):
    assert reward_of(reward, gold, rf"\boxed{{{answer}}}") == float(is_right)


def test_a_letter_in_a_value_is_no_second_choice():
    assert choice_with_value("(B) 2 P(A)") == ("B", "2 P(A)")
    assert choice_with_value("(B) triangle ABC.") == ("B", "triangle ABC.")


@pytest.mark.parametrize("reward", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize(
    ("gold", "answer", "is_right"),
    [
        ("5", r"5 \text{ or seven}", False),
        ("5", r"5 \text{ but maybe seven}", False),
        ("5", r"5 \text{ (not sure)}", False),
        ("5", r"\ge 5", False),
        ("5", r"\neq 5", False),
        ("5", "< 5", False),
        ("2024-03-05", "2016", False),
        ("2024-03-05", "2024-05-03", False),
        ("5 March", "5 April", False),
        ("5", r"5 \text{ apples}", True),
        ("5", r"5 \text{ or five}", True),
        ("5", r"x = 5", True),
        ("2024-03-05", "2024-03-05", True),
        ("5 March", "5 Mar", True),
    ],
)
def test_bounds_doubts_and_other_dates_are_wrong(reward, gold, answer, is_right):
    assert reward_of(reward, gold, rf"\boxed{{{answer}}}") == float(is_right)


def test_a_difference_that_is_no_date_keeps_its_value():
    assert reward_of(math_verify, "2016", r"\boxed{2024-8}") == 1.0


@pytest.mark.parametrize(
    ("gold", "completion", "is_right"),
    [
        ("5", "The answer is not 5.", False),
        ("5", "The answer isn't 5, it's 7.", False),
        ("5", "The answer is 7. The answer is not 5.", False),
        ("5", "The answer is 5, possibly 7.", False),
        ("5", "<answer>It is 7, not 5</answer>", False),
        ("B", "The answer is B, C", False),
        ("B", "The answer is B. Or C.", False),
        ("5", "The answer is not 7 but 5.", True),
        ("5", "The answer is 5, not 7.", True),
        ("5", "It is not 7. The answer is 5.", True),
        ("0.5", "The answer is 0.5, or 1/2.", True),
        ("3, 4", "The answer is 3 and 4.", True),
        ("B", "The answer is B. A is wrong.", True),
        ("B", "The answer is (B).", True),
    ],
)
def test_free_text_that_denies_or_doubts_a_value(gold, completion, is_right):
    assert reward_of(math_verify, gold, completion) == float(is_right)
