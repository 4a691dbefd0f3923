"""Countdown: compute the target from the given numbers, using each number exactly once.

The answer is parsed into a syntax tree and computed in exact fractions. It is never executed. It may contain + - * /
(also a minus sign), parentheses, blanks and plain decimal integers. `score_steps` scores the same answer step by step:

    each number in the answer   +c if it is one of `nums` and was not used before, -c otherwise
    the end of the answer       +1 if the answer is right, as in `score`

Here c = 0.3 / len(nums), so that all numbers together are worth less than the answer. The answer begins at the <answer>
tag after the thought. If its end tag is missing, it extends to the end of the completion. If there are several <answer>
tags or none, there are no steps. At most 2 * len(nums) numbers are scored, which limits the penalty for repeated
numbers.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

from async_grpo.rewards.adapter.decorators import rows_checked_by
from async_grpo.rewards.builtin.answers import answer_block, completion_text
from async_grpo.rewards.builtin.text import well_formedness

FORMAT_WEIGHT = 0.1
NUMBERS_CREDIT = 0.3  # largest sum of the rewards for numbers in `score_steps`
# Limits on a number in the row, because computing with 1e999999999 would take hours
MAX_NUMBER_CHARACTERS = 400
MAX_EXPONENT_CHARACTERS = 4
# Maximum length of an answer, which also limits the depth of its syntax tree and the size of its values
MAX_CHARACTERS = 300

_ANSWER = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"[0-9]+")
_TEXT = re.compile(r"(?:(?:0|[1-9][0-9]*)(?![0-9])|[+\-*/() ])+")
NOT_ARITHMETIC = (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def parse_arithmetic(expression: str) -> ast.expr:
    """Parse an arithmetic expression into a syntax tree.

    Raises:
        ValueError or another of `NOT_ARITHMETIC`: The text is not plain arithmetic, or is nested too deeply.
    """
    text = expression.strip()
    if len(text) > MAX_CHARACTERS or not _TEXT.fullmatch(text):
        raise ValueError(
            f"only + - * / ( ), blanks and plain numbers are allowed, at most {MAX_CHARACTERS} characters"
        )
    return ast.parse(text, mode="eval").body


def value_of(node: ast.expr) -> Fraction:
    """Compute the exact value of a syntax tree.

    Raises:
        ValueError or another of `NOT_ARITHMETIC`: The tree contains other operators, or a division by zero.
    """
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            value: Fraction = _OPERATORS[type(op)](value_of(left), value_of(right))
            return value
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def solves(expression: str, nums: list[int], target: Fraction) -> bool:
    """Return whether the expression uses each of `nums` exactly once and is equal to `target`."""
    try:
        tree = parse_arithmetic(expression)
        used_numbers = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return used_numbers == Counter(nums) and value_of(tree) == target
    except NOT_ARITHMETIC:
        return False


def task_of(sample: dict[str, Any]) -> tuple[list[int], Fraction]:
    """Return the row's `nums` and its `target` (or `answer`), which may be numbers or texts.

    Raises:
        ValueError: A value is missing, is not a number of the right kind, or is too large.
    """
    nums = sample.get("nums")
    target = sample.get("target", sample.get("answer"))
    try:
        if not isinstance(nums, (list, tuple)) or not nums:
            raise ValueError("no list of numbers")
        texts = [str(number) for number in [*nums, target]]
        for text in texts:
            exponent = text.lower().partition("e")[2]
            if len(text) > MAX_NUMBER_CHARACTERS or len(exponent.strip()) > MAX_EXPONENT_CHARACTERS:
                raise ValueError("a number is too large")
        *numbers, exact_target = [Fraction(text) for text in texts]
        if any(number.denominator != 1 for number in numbers):
            raise ValueError("a fraction among the numbers")
        # In an answer, "-3" is the number 3 and a minus sign. So no answer could use a number -3
        if any(number < 0 for number in numbers):
            raise ValueError("a negative number among the numbers")
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"`nums` must be a list of whole numbers of at least 0, `target` (or `answer`) a number, not {nums!r}, "
            f"{target!r}: {error}"
        ) from error
    return [int(number) for number in numbers], exact_target


def check_row(row: dict[str, Any]) -> None:
    """Raise ValueError if the row has no usable `nums` or `target`."""
    task_of(row)


@rows_checked_by(check_row)
def score(sample: dict[str, Any]) -> dict[str, float]:
    r"""Return 0.1 times the well-formedness, plus 1 for a right answer in the only answer block.

    Raises:
        ValueError: The row has no usable `nums` or `target`.

    >>> score({"completion": "so</think>\n<answer>3*(4+5)</answer>", "nums": [3, 4, 5], "target": 27})
    {'reward': 1.1, 'format_reward': 1.0, 'answer_reward': 1.0}
    """
    nums, target = task_of(sample)
    completion = completion_text(sample)
    answer = answer_block(completion)
    format_reward = well_formedness(completion)
    answer_reward = float(answer is not None and solves(answer, nums, target))
    return {
        "reward": FORMAT_WEIGHT * format_reward + answer_reward,
        "format_reward": format_reward,
        "answer_reward": answer_reward,
    }


def score_steps(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the reward of each step (see the docstring of the module), the sum for the numbers, and the answer's reward.

    Numbers are compared as text: "03" is not 3.

    Raises:
        ValueError: The row has no usable `nums` or `target`.
    """
    nums, _ = task_of(sample)
    answer_reward = score(sample)["answer_reward"]
    text = str(sample["completion"])
    # Positions refer to the whole completion. Only an end token and white space after the scored text are cut off.
    num_leading_spaces = len(text) - len(text.lstrip())
    text = text[: num_leading_spaces + len(completion_text(sample))]
    begin, end = _answer_span(text)
    unused_numbers = [str(number) for number in nums]
    credit = NUMBERS_CREDIT / len(nums)
    steps = []
    for match in islice(_NUMBER.finditer(text, begin, end), 2 * len(nums)):
        is_right = match[0] in unused_numbers
        if is_right:
            unused_numbers.remove(match[0])
        steps.append({"reward": credit if is_right else -credit, "char_end": match.end()})
    numbers_reward = sum(step["reward"] for step in steps)
    if answer_reward:
        steps.append({"reward": answer_reward, "char_end": end + len("</answer>")})
    return {"step_rewards": steps, "numbers_reward": numbers_reward, "answer_reward": answer_reward}


def _answer_span(text: str) -> tuple[int, int]:
    """Return where the only answer after the thought begins and ends, or (0, 0) if there are several or none."""
    # Without "</think>", the search starts at the beginning of the text
    start = text.rfind("</think>") + 1
    if text.count("<answer>", start) != 1:
        return 0, 0
    match = _ANSWER.search(text, start)
    return match.span(1) if match else (0, 0)
