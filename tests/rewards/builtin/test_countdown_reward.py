"""The countdown reward against hand arithmetic and an independent parser."""

import operator
from fractions import Fraction
from itertools import permutations, product

import pytest
from fuzz_checkers import Arithmetic
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.rewards.builtin.countdown import score, solves
from async_grpo.rewards.builtin.text import format as format_score


def completion(answer: str, thought: str = "hm") -> str:
    return f"{thought}</think>\n<answer>{answer}</answer>"


def answer_reward(answer: str, nums: list[int], target: int) -> float:
    return score({"completion": completion(answer), "nums": nums, "target": target})["answer_reward"]


RIGHT = [
    ("(1 + 2) / 3", [3, 2, 1], 1),
    ("3*(4+5)", [3, 4, 5], 27),
    ("8/(3-8/3)", [8, 8, 3, 3], 24),  # 8 / (1/3): floating point says 23.999999999999989
    ("-3 + 10", [3, 10], 7),
    ("10--3", [3, 10], 13),
    ("\n3+4\n", [3, 4], 7),
    ("0+5", [0, 5], 5),
    ("((((2))))*3", [2, 3], 6),
    ("-" * 250 + "7", [7], 7),
]
WRONG = [
    ("7//2", [7, 2], 3),
    ("2* *3", [2, 3], 8),
    ("9**9**9", [9, 9, 9], 1),
    ("3*(4+5) = 27", [3, 4, 5], 27),
    ("3+4\n+5", [3, 4, 5], 12),
    ("03+4", [3, 4], 7),
    ("3e0+4", [3, 4], 7),
    ("+3+4", [3, 4], 7),
    ("3 4", [3, 4], 34),
    ("int(3)+4", [3, 4], 7),
    ("٣+4", [3, 4], 7),  # an Arabic three: a digit for str.isdigit and int
    ("4/(2-2)", [4, 2, 2], 0),
    ("3+4", [3, 4, 5], 7),  # a number is missing
    ("3+4+4", [3, 4], 11),  # a number is used twice
    ("1/3*3*25", [1, 3, 3], 25),
    ("333334/333333", [333334, 333333], 1),  # 1.000003: within the tolerance of floating-point checkers
    ("", [7], 7),
    ("7" * 5000, [7], 7),
    ("(" * 140 + "7" + ")" * 140, [7], 8),
]


@pytest.mark.parametrize("case", RIGHT + WRONG, ids=lambda case: case[0][:12])
def test_a_right_expression_earns_the_answer_reward_and_anything_else_nothing(case):
    assert answer_reward(*case) == float(case in RIGHT)


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def test_every_expression_of_three_numbers_is_worth_what_exact_arithmetic_says():
    """All orders, operations and brackets: the value is computed beside the text, and not from it."""
    for (a, b, c), one, two in product(permutations((2, 3, 7)), OPERATIONS, OPERATIONS):
        first, second = OPERATIONS[one], OPERATIONS[two]
        x, y, z = map(Fraction, (a, b, c))
        values = {
            f"({a}{one}{b}){two}{c}": second(first(x, y), z),
            f"{a} {one} ({b} {two} {c})": first(x, second(y, z)),
        }
        for text, value in values.items():
            for nums, target, solved in (
                ([7, 2, 3], value, True),
                ([7, 2, 3], value + Fraction(1, 10**6), False),
                ([7, 2, 2], value, False),
                ([7, 2, 3, 3], value, False),
            ):
                assert solves(text, nums, target) == solved, (text, nums, target)


# Here the reference is a recursive descent over characters; the reward walks a syntax tree.


def reference_value(text: str, nums: list[int]) -> Fraction | None:
    try:
        reference = Arithmetic(text)
    except (ValueError, ZeroDivisionError):
        return None
    return reference.value if sorted(reference.numbers) == sorted(nums) and "\0" not in text else None


@given(
    text=st.text(alphabet="0123456789+-*/() ", max_size=40) | st.text(max_size=40), target=st.integers(-5, 5)
)
@settings(max_examples=100, deadline=None)
def test_no_text_raises_and_credit_needs_the_reference_to_agree(text, target):
    earned = answer_reward(text, [1, 2], target)
    expected = reference_value(text, [1, 2]) == target and "</" not in text
    assert earned == float(expected)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"nums": ["3", "4", "5"], "target": "27"}, 1.0),
        ({"nums": [3.0, 4, 5], "target": 27.0}, 1.0),
        ({"nums": [3, 4, 5], "answer": "27"}, 1.0),
        ({"nums": [3, 4, 5], "answer": "27", "target": 26}, 0.0),  # `target` goes before `answer`
    ],
)
def test_the_row_may_hold_numbers_or_text(row, expected):
    assert score({"completion": completion("3*(4+5)"), **row})["answer_reward"] == expected


@pytest.mark.parametrize(
    "row",
    [
        {"target": 7},
        {"nums": [], "target": 7},
        {"nums": [7]},
        {"nums": ["x"], "target": 7},
        {"nums": [-3, 10], "target": 7},  # "-3 + 10" uses the number 3
        {"nums": ["-7"], "target": -7},
    ],
)
def test_a_row_without_a_task_raises_so_that_the_sample_fails(row):
    with pytest.raises(ValueError):
        score({"completion": completion("7"), **row})


FORMATS = [
    # completion after the prefilled "<think>", well-formedness, answer reward for 3+4 = 7
    ("so</think>\n<answer>3+4</answer>", 1.0, 1.0),
    ("so</think>\n<answer>3+4</answer><|im_end|>\n", 1.0, 1.0),
    ("an <answer>?</think>\n<answer>3+4</answer>", 1.0, 1.0),  # the thought may mention the tag
    ("so</think>\n<answer>5</answer>", 1.0, 0.0),
    ("so</think> <answer>3+4</answer>", 0.6, 1.0),  # 0.1 for the thought, 0.5 for the answer
    ("so</think>\n\n<answer>3+4</answer>", 0.6, 1.0),
    ("so</think>\n<answer>3+4</answer> as asked", 0.6, 1.0),
    ("a</think>b</think>\n<answer>3+4</answer>", 0.6, 1.0),
    ("<answer>3+4</answer>", 0.5, 1.0),
    ("so</think>\n<answer>3+4</answer> <answer>3+4</answer>", 0.1, 0.0),  # two blocks: which one is meant?
    ("so</think>\n<answer><answer>3+4</answer>", 0.1, 0.0),
    ("so</think>\n</answer>3+4<answer>", 0.1, 0.0),
    ("so</think> 7", 0.1, 0.0),
    ("seven", 0.0, 0.0),
    ("", 0.0, 0.0),
]


@pytest.mark.parametrize(("text", "format_reward", "expected_answer"), FORMATS)
def test_the_reward_is_a_tenth_of_the_format_plus_the_answer(text, format_reward, expected_answer):
    sample = {"completion": text, "nums": [3, 4], "target": 7, "end_token": "<|im_end|>"}
    result = score(sample)
    assert result["format_reward"] == pytest.approx(format_reward)
    assert result["answer_reward"] == expected_answer
    assert result["reward"] == pytest.approx(0.1 * format_reward + expected_answer)
    expected = {"reward": pytest.approx(0.5 * format_reward), "format_reward": format_reward}
    assert format_score(sample, weight=0.5) == expected
