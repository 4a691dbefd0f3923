"""Countdown: reach the target with the given numbers, each used exactly once.

The answer is read as a syntax tree and computed in exact fractions; it is never executed. Allowed are + - * / (and a
minus sign), parentheses, blanks and plain decimal integers. `score_steps` judges the same step by step.

    each number in the answer   +f if it is one of `nums` and not used before, else -f
    the close of the answer     +1 if it is right, as `score` judges

with f = 0.3 / len(nums), so that all numbers together are worth less than the answer. The answer begins with the
only <answer> behind the thought. One without an end is judged as far as it goes; without a beginning, or with
several, there are no steps. No more than 2 * len(nums) numbers are judged: babble must not cost without bound.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

from async_grpo.rewards.builtin.answers import answer_block, completion_text
from async_grpo.rewards.builtin.text import well_formedness

FORMAT_WEIGHT = 0.1
NUMBERS_CREDIT = 0.3  # of all numbers together, where steps are judged
MAX_NUMBER_CHARACTERS, MAX_EXPONENT_CHARACTERS = 400, 4  # of the row: 1e999999999 would take hours
MAX_CHARACTERS = 300  # these also bound the depth of the tree and the digits of every value

_ANSWER = re.compile(r"<answer>(.*?)(</answer>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"[0-9]+")
_TEXT = re.compile(r"(?:(?:0|[1-9][0-9]*)(?![0-9])|[+\-*/() ])+")
NOT_ARITHMETIC = (ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError)
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def parse_arithmetic(expression: str) -> ast.expr:
    """The syntax tree of the stripped `expression`. Raises one of `NOT_ARITHMETIC`, the last two for depth."""
    text = expression.strip()
    if len(text) > MAX_CHARACTERS or not _TEXT.fullmatch(text):
        raise ValueError(f"not {MAX_CHARACTERS} characters of + - * / ( ), blanks and plain numbers at most")
    return ast.parse(text, mode="eval").body


def value_of(node: ast.expr) -> Fraction:
    """The exact value. Raises one of `NOT_ARITHMETIC` for other operators and divisions by zero."""
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
    """Whether the expression uses each of `nums` exactly once and has exactly the value `target`."""
    try:
        tree = parse_arithmetic(expression)
        written = Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return written == Counter(nums) and value_of(tree) == target
    except NOT_ARITHMETIC:
        return False


def task_of(sample: dict[str, Any]) -> tuple[list[int], Fraction]:
    """`nums` and `target` (or `answer`) of the row, given as numbers or as text. Raises ValueError."""
    nums, target = sample.get("nums"), sample.get("target", sample.get("answer"))
    try:
        if not isinstance(nums, (list, tuple)) or not nums:
            raise ValueError("no list of numbers")
        texts = [str(number) for number in [*nums, target]]
        for text in texts:
            exponent = text.lower().partition("e")[2]
            if len(text) > MAX_NUMBER_CHARACTERS or len(exponent.strip()) > MAX_EXPONENT_CHARACTERS:
                raise ValueError("a number is too large")
        *numbers, goal = map(Fraction, texts)
        if any(number.denominator != 1 for number in numbers):
            raise ValueError("a fraction among the numbers")
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"`nums` must be a list of whole numbers, `target` (or `answer`) a number, not {nums!r}, {target!r}"
        ) from error
    return [int(number) for number in numbers], goal


def score(sample: dict[str, Any]) -> dict[str, float]:
    """0.1 * well-formedness + 1 for a right answer: at most 1.1. Exactly one answer block earns credit.
    Raises ValueError: the row has no usable `nums` or `target`.

    >>> score({"completion": "so</think>\\n<answer>3*(4+5)</answer>", "nums": [3, 4, 5], "target": 27})
    {'reward': 1.1, 'format_reward': 1.0, 'answer_reward': 1.0}
    """
    nums, target = task_of(sample)
    completion = completion_text(sample)
    answer = answer_block(completion)
    answer_reward = float(answer is not None and solves(answer, nums, target))
    parts = {"format_reward": well_formedness(completion), "answer_reward": answer_reward}
    return {"reward": FORMAT_WEIGHT * parts["format_reward"] + answer_reward, **parts}


def score_steps(sample: dict[str, Any]) -> dict[str, Any]:
    """The steps, and what they are worth by kind. Numbers are compared as text: "03" is not 3.
    Raises ValueError: the row has no usable `nums` or `target`.
    """
    nums, _ = task_of(sample)
    answer_reward = score(sample)["answer_reward"]
    text = str(sample["completion"])
    indent = len(text) - len(text.lstrip())  # the rules see the text without it, and without the end token
    text = text[: indent + len(completion_text(sample))]
    start = text.rfind("</think>") + 1  # without a thought, the whole text
    answer = _ANSWER.search(text, start) if text.count("<answer>", start) == 1 else None
    begin, end = answer.span(1) if answer else (0, 0)
    unused, credit = [str(number) for number in nums], NUMBERS_CREDIT / len(nums)
    steps = []
    for match in islice(_NUMBER.finditer(text, begin, end), 2 * len(nums)):
        fits = match[0] in unused
        if fits:
            unused.remove(match[0])
        steps.append({"reward": credit if fits else -credit, "char_end": match.end()})
    numbers_reward = sum(step["reward"] for step in steps)
    if answer_reward:
        steps.append({"reward": answer_reward, "char_end": end + len("</answer>")})
    return {"step_rewards": steps, "numbers_reward": numbers_reward, "answer_reward": answer_reward}
