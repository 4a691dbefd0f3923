"""Countdown: reach the target with the given numbers, each used exactly once.

The answer is read as a syntax tree and computed in exact fractions; it is never executed. Allowed are + - * /
(and a minus sign), parentheses, blanks and plain decimal integers. Everything else (powers, `//`, names,
leading zeros, an "= 23", anything beyond the limits below) is a wrong answer. A division by zero is one too.

`score_steps` judges the same step by step: what a process reward model says, by rule.

    each number in the answer   +f if it is one of `nums` and not used before, else -f
    the close of the answer     +1 if it is right, as `score` judges

with f = 0.3 / len(nums), so that all numbers together are worth less than the answer. The answer begins with the
only <answer> behind the thought. One without an end is judged as far as it goes; without a beginning, or with
several, there are no steps. No more than 2 * len(nums) numbers are judged: babble must not cost without bound.
"""

import ast
import re
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

from async_grpo.rewards.builtin.answers import completion_text
from async_grpo.rewards.builtin.format import answer_block, response_text, well_formedness

FORMAT_WEIGHT = 0.1
NUMBERS_CREDIT = 0.3  # of all numbers together, where steps are judged
MAX_CHARACTERS = 300
MAX_NODES = 100
MAX_DIGITS = 12  # of one written number
MAX_MAGNITUDE = 10**50  # of the numerator and the denominator of any intermediate value

_OPEN, _CLOSE = "<answer>", "</answer>"
_NUMBER = re.compile(r"[0-9]+")
_ALPHABET = re.compile(r"[0-9+\-*/() ]+")
_LEADING_ZERO = re.compile(r"(?<!\d)0\d")
_TOO_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")


class NotArithmetic(ValueError):
    """The text is not an expression of the permitted kind, or has no value."""


def parse(expression: str) -> ast.expr:
    """The syntax tree of `expression`, surrounding white space aside. Raises NotArithmetic."""
    text = expression.strip()
    if len(text) > MAX_CHARACTERS or not _ALPHABET.fullmatch(text):
        raise NotArithmetic(f"only {MAX_CHARACTERS} characters of 0-9 + - * / ( ) and blanks are allowed")
    if _LEADING_ZERO.search(text) or _TOO_LONG_NUMBER.search(text):
        raise NotArithmetic(f"a number has a leading zero or more than {MAX_DIGITS} digits")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: too deeply nested
        raise NotArithmetic(f"{text!r} is not an expression: {error}") from error
    if sum(isinstance(node, ast.expr) for node in ast.walk(tree)) > MAX_NODES:
        raise NotArithmetic(f"more than {MAX_NODES} numbers and operators")
    return tree


def numbers_of(tree: ast.expr) -> list[int]:
    """Every number written in the tree.

    >>> numbers_of(parse("3*(4+5)"))
    [3, 4, 5]
    """
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, int)]


def value_of(node: ast.expr) -> Fraction:
    """The exact value. Raises NotArithmetic for other operators, divisions by zero, huge intermediate values.

    >>> value_of(parse("(1 + 2) / -4"))
    Fraction(-3, 4)
    """
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            value = _apply(operator, value_of(left), value_of(right))
        case _:
            raise NotArithmetic(f"{type(node).__name__} is not arithmetic")
    if max(abs(value.numerator), value.denominator) > MAX_MAGNITUDE:
        raise NotArithmetic(f"an intermediate value is beyond {MAX_MAGNITUDE:.0e}")
    return value


def _apply(operator: ast.operator, left: Fraction, right: Fraction) -> Fraction:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div() if right:
            return left / right
    raise NotArithmetic(f"{type(operator).__name__} is not allowed here, or divides by zero")


def solves(expression: str, nums: list[int], target: Fraction) -> bool:
    """Whether the expression uses each of `nums` exactly once and has exactly the value `target`.

    >>> solves("3*(4+5)", [5, 4, 3], Fraction(27)), solves("3**(4+5)", [5, 4, 3], Fraction(19683))
    (True, False)
    """
    try:
        tree = parse(expression)
        return Counter(numbers_of(tree)) == Counter(nums) and value_of(tree) == target
    except NotArithmetic:
        return False


def task_of(sample: dict[str, Any]) -> tuple[list[int], Fraction]:
    """`nums` and `target` (or else `answer`) of the row, given as numbers or as text. Raises ValueError."""
    nums, target = sample.get("nums"), sample.get("target", sample.get("answer"))
    if not isinstance(nums, (list, tuple)) or not nums:
        raise ValueError(f"a countdown row needs a list `nums`, not {nums!r}")
    numbers = [_number(number) for number in nums]
    if any(number.denominator != 1 for number in numbers):
        raise ValueError(f"the `nums` of a countdown row must be whole numbers, not {nums!r}")
    return [int(number) for number in numbers], _number(target)


def _number(value: Any) -> Fraction:
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"`nums` and `target` (or `answer`) must be numbers, not {value!r}") from error


def score(sample: dict[str, Any]) -> dict[str, float]:
    """0.1 * well-formedness + 1 for a right answer: at most 1.1. Exactly one answer block earns credit.

    Raises:
        ValueError: the row has no usable `nums` or `target`.

    >>> score({"completion": "so</think>\\n<answer>3*(4+5)</answer>", "nums": [3, 4, 5], "target": 27})
    {'reward': 1.1, 'format_reward': 1.0, 'answer_reward': 1.0}
    """
    nums, target = task_of(sample)
    response = response_text(sample)
    answer = answer_block(response)
    answer_reward = float(answer is not None and solves(answer, nums, target))
    format_reward = well_formedness(response)
    return {
        "reward": FORMAT_WEIGHT * format_reward + answer_reward,
        "format_reward": format_reward,
        "answer_reward": answer_reward,
    }


def answer_bounds(text: str) -> tuple[int, int]:
    """Where the only answer behind the thought begins and ends; (0, 0) if there is not exactly one beginning.

    >>> answer_bounds("</think><answer>1+2</answer>"), answer_bounds("1+2</answer>")
    ((16, 19), (0, 0))
    """
    thought_end = text.rfind("</think>") + 1  # 0 without a thought: then the whole text is searched
    if text.count(_OPEN, thought_end) != 1:
        return 0, 0
    begin = text.index(_OPEN, thought_end) + len(_OPEN)
    end = text.find(_CLOSE, begin)
    return begin, end if end >= 0 else len(text)


def number_steps(text: str, begin: int, end: int, nums: list[int]) -> list[dict[str, float]]:
    """A step for each number written in text[begin:end]. As text: "03" is not 3.

    >>> number_steps("14*14", 0, 5, [14, 3])
    [{'reward': 0.15, 'char_end': 2}, {'reward': -0.15, 'char_end': 5}]
    """
    unused = [str(number) for number in nums]
    credit = NUMBERS_CREDIT / len(nums)
    steps = []
    for match in islice(_NUMBER.finditer(text, begin, end), 2 * len(nums)):
        fits = match[0] in unused
        if fits:
            unused.remove(match[0])
        steps.append({"reward": credit if fits else -credit, "char_end": match.end()})
    return steps


def score_steps(sample: dict[str, Any]) -> dict[str, Any]:
    """The steps, and what they are worth by kind.

    Raises:
        ValueError: the row has no usable `nums` or `target`.

    >>> found = score_steps({"completion": "</think><answer>9</answer>", "nums": [9], "target": 9})
    >>> found["step_rewards"]
    [{'reward': 0.3, 'char_end': 17}, {'reward': 1.0, 'char_end': 26}]
    """
    nums, _ = task_of(sample)
    answer_reward = score(sample)["answer_reward"]
    text = str(sample["completion"])
    indent = len(text) - len(text.lstrip())  # the rules see the text without it, and without the end token
    text = text[: indent + len(completion_text(sample))]
    begin, end = answer_bounds(text)
    steps = number_steps(text, begin, end, nums)
    numbers_reward = sum(step["reward"] for step in steps)
    if answer_reward:
        steps.append({"reward": answer_reward, "char_end": end + len(_CLOSE)})
    return {"step_rewards": steps, "numbers_reward": numbers_reward, "answer_reward": answer_reward}
