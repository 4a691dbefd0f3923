r"""Rewards that follow simple rules: the literal answer, the format, a pattern, the length.

A completion consists of a thought, which ends with `</think>`, and the text after it. The prompt ends with "<think>",
so that tag is not part of the completion.
"""

import math
import re
import unicodedata
from importlib import import_module
from itertools import product
from typing import Any

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.adapter.decorators import best_reward
from async_grpo.rewards.answer_reading.characters import compatible, plain_characters
from async_grpo.rewards.answer_reading.choices import compared_parts, plain_choice
from async_grpo.rewards.answer_reading.notation import words_of
from async_grpo.rewards.builtin import answers

SECONDS = 2.0  # maximum time of one match of a regular expression
MAX_CHARACTERS = 100_000  # maximum length of a text to match
SCHEDULES = ("overlong", "cosine")
JUDGES = ("math_verify", "mathd", "sympy", "countdown", "exact")

# Partial rewards for a response that is not well formed (see `well_formedness`)
CLOSED_THOUGHT_REWARD = 0.1
ONE_ANSWER_REWARD = 0.5

# Parameters of `cosine` from the main results of its paper: (r_0, r_L) for right and for wrong answers, and r_e
RIGHT = (2.0, 1.0)
WRONG = (-10.0, 0.0)
EXCEEDED = -10.0

# Tags, comments, empty boxes, and the marks around formulas and code: without other text, they are no answer
_MARKS = re.compile(r"<[a-zA-Z/!][^<>]*>|\\boxed\s?\{\s*\}|[`$]")
_MARKDOWN_MARKS = ("**", "`")
_STRAIGHT_QUOTES = str.maketrans("‘’“”", "''\"\"")
_BLANK_CATEGORIES = ("Z", "C")  # Unicode's separators, and its control, format and unassigned characters

_WELL_FORMED = re.compile(r".*?</think>\n<answer>.*?</answer>", re.DOTALL)


def exact(sample: dict[str, Any], strip: bool = True, case: bool = False) -> dict[str, float]:
    r"""Return 1 if the answer is literally equal to an accepted answer, and 0 otherwise.

    Use this reward for multiple choice, names and short texts. The answer is the content of the last \boxed{}, or else
    the content of the only <answer> after the thought, or else all text after the thought (`stated_answer`). The
    accepted answers are the entries of the row's list `answers`, or else its `answer`. Texts are compared in the
    Unicode form NFKC, with straight quotation marks, and without a font command around the whole answer, as in \text{C}.
    A single letter may stand in parentheses. Unless `strip` is false, the completion's answer may also end with a full
    stop, and stand between the marks ** or ` of Markdown.

    Args:
        sample: The completion and its row.
        strip: Ignore white space at the ends, and treat all white space between words as one blank.
        case: Distinguish between upper and lower case.

    Raises:
        ValueError: The row has no answer, or an answer that is empty or unusable.
    """
    golds = sample.get("answers")
    if golds is None:
        golds = [sample.get("answer")]
    if not isinstance(golds, list) or not golds:
        raise ValueError(f"the row's answers must be a list of texts or numbers, not {golds!r:.200}")
    texts = [answers.gold_answer({"answer": gold}, is_latex=False) for gold in golds]
    completion = answers.completion_text(sample)
    readings = [
        answers.stated_answer(completion, ("box", "block", "rest")),
        # Keep the layout, because the content of a box may not be LaTeX: in `\boxed{~/bin}`, "~" is part of a path
        answers.stated_answer(completion, ("written box", "block", "rest")),
    ]
    stated = [reading for reading in readings if reading is not None]
    if strip:
        stated += [_without_marks(reading) for reading in stated]
    for gold, reading in product(texts, stated):
        pairs = compared_parts(gold, reading)
        if all(_normalised(part, strip, case) == _normalised(text, strip, case) for part, text in pairs):
            return {"reward": 1.0}
    return {"reward": 0.0}


def _without_marks(answer: str) -> str:
    """Return an answer without a full stop at its end, and without the Markdown marks of bold or code around all of it.

    >>> _without_marks("**Paris.**"), _without_marks("`x = 1`."), _without_marks("**a** or **b**"), _without_marks("a...")
    ('Paris', 'x = 1', '**a** or **b**', 'a...')
    """
    text = _without_full_stop(answer.strip())
    for mark in _MARKDOWN_MARKS:
        content = text.removeprefix(mark).removesuffix(mark)
        if len(text) == len(content) + 2 * len(mark) and mark not in content:
            text = content.strip()
    return _without_full_stop(text)


def _without_full_stop(text: str) -> str:
    return text if text.endswith("..") else text.removesuffix(".")


def _normalised(text: str, strip: bool, case: bool) -> str:
    """Return the normal form of an answer. Two answers are equal if their normal forms are."""
    text = words_of(answers.without_delimiters(text))
    text = compatible(plain_characters(text)).translate(_STRAIGHT_QUOTES)
    text = plain_choice(text) or text
    if strip:
        text = " ".join(text.split())
    return answers.ungrouped(text if case else text.casefold())


@best_reward(lambda weight=0.1: weight)
def format(sample: dict[str, Any], weight: float = 0.1) -> dict[str, float]:
    """Return `weight` times the well-formedness of the completion."""
    format_reward = well_formedness(answers.completion_text(sample))
    return {"reward": weight * format_reward, "format_reward": format_reward}


def well_formedness(completion: str) -> float:
    """Return 1.0 for a well-formed response. Otherwise return 0.1 for a closed thought plus 0.5 for exactly one answer.

    A well-formed response has exactly one `</think>` and one answer, with one line break between them:

        <think> ... </think>
        <answer> ... </answer>

    Answer tags inside the thought are ignored. An answer that contains nothing but white space, tags and empty marks is
    no answer.
    """
    has_thought = "</think>" in completion
    answer = answers.answer_block(completion)
    has_answer = answer is not None and _says_something(answer)
    if has_answer and completion.count("</think>") == 1 and _WELL_FORMED.fullmatch(completion):
        return 1.0
    return (CLOSED_THOUGHT_REWARD if has_thought else 0.0) + (ONE_ANSWER_REWARD if has_answer else 0.0)


def _says_something(answer: str) -> bool:
    r"""Return whether an answer contains more than white space, tags and empty marks.

    >>> _says_something("0"), _says_something(" \n"), _says_something("<b></b>"), _says_something("<b>7</b>")
    (True, False, False, True)
    """
    text = _MARKS.sub("", answer)
    return any(unicodedata.category(character)[0] not in _BLANK_CATEGORIES for character in text)


def regex(sample: dict[str, Any], pattern: str | None = None, search: bool = False) -> dict[str, float]:
    r"""Return 1 if a pattern matches the text after the thought, and 0 otherwise.

    A text of more than 100,000 characters gets 0.

    Args:
        sample: The completion and its row. A `pattern` in the row overrides the option.
        pattern: A regular expression of Python.
        search: Whether the pattern may match a part of the text. By default it must match the whole text.

    Raises:
        ValueError: There is no pattern, or it is not a valid regular expression.
        TimeoutError: The match takes too long. The sample then gets no reward.
    """
    pattern = sample.get("pattern") or pattern
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"`regex` needs a column or an option `pattern`, not {pattern!r:.200}")
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.200} is no regular expression: {error}") from error
    text = answers.completion_text(sample).rpartition("</think>")[2].strip()
    if len(text) > MAX_CHARACTERS:
        return {"reward": 0.0}
    with interrupted_after(SECONDS, f"the pattern {pattern!r:.200} on this text"):
        match = expression.search(text) if search else expression.fullmatch(text)
    return {"reward": float(match is not None)}


def overlong(num_tokens: int, max_tokens: int, cache_tokens: int) -> float:
    """Return the soft overlong punishment of Yu et al., "DAPO" (2025), equation 13.

    With L = num_tokens, M = max_tokens and C = cache_tokens:

        0 if L <= M - C;    ((M - C) - L) / C if M - C < L <= M;    -1 if L > M
    """
    if num_tokens > max_tokens:
        return -1.0
    return min(0.0, (max_tokens - cache_tokens - num_tokens) / cache_tokens)


def cosine(num_tokens: int, max_tokens: int, right: bool) -> float:
    """Return the cosine length reward, which prefers short right answers and long wrong answers.

    Source: Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (2025), section 4.2.

        r_L + (r_0 - r_L) (1 + cos(pi L / L_max)) / 2 if L < L_max;    r_e if L >= L_max

    Here L is num_tokens and L_max is max_tokens. (r_0, r_L) is RIGHT if the answer is right and WRONG otherwise, and r_e
    is EXCEEDED.
    """
    if num_tokens >= max_tokens:
        return EXCEEDED
    at_zero, at_max = RIGHT if right else WRONG
    return at_max + (at_zero - at_max) * (1 + math.cos(math.pi * num_tokens / max_tokens)) / 2


def length(
    sample: dict[str, Any],
    schedule: str = "overlong",
    max_tokens: int = 4096,
    cache_tokens: int = 1024,
    judge: str = "math_verify",
) -> dict[str, float]:
    """Return a reward for the length of the completion, and the length in tokens (`num_tokens`).

    Args:
        sample: The completion and its row.
        schedule: `overlong`, a penalty to add to another reward (--reward-combine sum), or `cosine`, a complete reward.
        max_tokens: Maximum number of generated tokens of the run.
        cache_tokens: For `overlong`, the number of tokens below `max_tokens` over which the penalty grows.
        judge: For `cosine`, the reward that decides whether an answer is right. Right is a reward of 1.0 or more.

    Raises:
        ValueError: An option has an impossible value, or the judge cannot score the row.
    """
    slope_tokens = cache_tokens if schedule == "overlong" else max_tokens
    if schedule not in SCHEDULES or judge not in JUDGES or not 0 < slope_tokens <= max_tokens:
        raise ValueError(
            f"`length` needs a schedule of {', '.join(SCHEDULES)}, a judge of {', '.join(JUDGES)} and 0 < cache_tokens <= "
            f"max_tokens, not {schedule!r}, {judge!r}, {cache_tokens}, {max_tokens}"
        )
    num_tokens = len(sample["completion_token_ids"])
    if schedule == "overlong":
        return {"reward": overlong(num_tokens, max_tokens, cache_tokens), "num_tokens": float(num_tokens)}
    # Import only the judge in use, because some judges need large packages
    score = exact if judge == "exact" else import_module(f"async_grpo.rewards.builtin.{judge}").score
    is_right = score(sample)["reward"] >= 1.0
    reward = cosine(num_tokens, max_tokens, is_right)
    return {"reward": reward, "num_tokens": float(num_tokens), "right": float(is_right)}
