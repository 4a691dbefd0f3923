r"""Small rules on the text of a completion: its literal answer, its format, a pattern, its length.

A completion is a thought, which ends with `</think>`, and what is behind it: the prompt of a row ends with "<think>".
"""

import math
import re
import unicodedata
from importlib import import_module
from typing import Any

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.adapter.decorators import best_reward
from async_grpo.rewards.builtin import answers

SECONDS = 2.0  # for one match
MAX_CHARACTERS = 100_000  # of a text that is matched
SCHEDULES = ("overlong", "cosine")
JUDGES = ("math_verify", "mathd", "sympy", "countdown", "exact")

# Of `cosine`: r_0 and r_L of right and of wrong answers, and r_e, as in the paper's main results
RIGHT, WRONG, EXCEEDED = (2.0, 1.0), (-10.0, 0.0), -10.0

_FONT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|mbox)\s*\{([^{}]*)\}")
_WELL_FORMED = re.compile(r".*?</think>\n<answer>.*?</answer>", re.DOTALL)


def exact(sample: dict[str, Any], strip: bool = True, case: bool = False) -> dict[str, float]:
    r"""Return 1 if the answer is literally one of those accepted, else 0: for choices, names and short texts.

    The answer is the content of the last \boxed{}, else of the one <answer> behind the thought, else all that is behind
    the thought (`stated_answer`). Accepted is the row's `answer`, or each entry of its list `answers`, after NFKC.
    The command of a font around all of the answer, as in \text{C}, does not count.

    Args:
        sample: the completion and its row.
        strip: white space does not count, but to divide words.
        case: capitals count.

    Raises:
        ValueError: the row has no answer, or an empty one.
    """
    listed = sample.get("answers")
    golds = [sample.get("answer")] if listed is None else listed
    if not isinstance(golds, list) or not golds:
        raise ValueError(f"the row's answers must be a list of texts or numbers, not {golds!r:.200}")
    texts = [answers.gold_answer({"answer": gold}, is_latex=False) for gold in golds]
    accepted = {_normalised(text, strip, case) for text in texts}
    completion = answers.completion_text(sample)
    readings = [
        answers.stated_answer(completion, ("box", "block", "rest")),
        # `\boxed{~/bin}` may be no LaTeX
        answers.stated_answer(completion, ("written box", "block", "rest")),
    ]
    is_accepted = any(text is not None and _normalised(text, strip, case) in accepted for text in readings)
    return {"reward": float(is_accepted)}


def _normalised(text: str, strip: bool, case: bool) -> str:
    """Return the text by which two answers are compared."""
    text = answers.without_delimiters(text)
    in_font = _FONT.fullmatch(text)
    text = unicodedata.normalize("NFKC", in_font[1] if in_font else text)
    text = " ".join(text.split()) if strip else text
    return answers.ungrouped(text if case else text.casefold())


@best_reward(lambda weight=0.1: weight)
def format(sample: dict[str, Any], weight: float = 0.1) -> dict[str, float]:
    """`weight` times the well-formedness."""
    format_reward = well_formedness(answers.completion_text(sample))
    return {"reward": weight * format_reward, "format_reward": format_reward}


def well_formedness(completion: str) -> float:
    """1.0 for a well-formed response, else 0.1 for a closed thought plus 0.5 for exactly one answer. Well formed is

        <think> ... </think>
        <answer> ... </answer>

    with one line break between the two, one `</think>` and one answer. The thought may mention the answer tags.
    """
    has_answer = answers.answer_block(completion) is not None
    if has_answer and completion.count("</think>") == 1 and _WELL_FORMED.fullmatch(completion):
        return 1.0
    return 0.1 * ("</think>" in completion) + 0.5 * has_answer


def regex(sample: dict[str, Any], pattern: str | None = None, search: bool = False) -> dict[str, float]:
    r"""1 if the row's `pattern`, else the option's, matches the whole text behind the thought, or with `search` some part.

    The pattern is Python's; a text beyond 100,000 characters is worth 0.

    ValueError: there is no pattern, or it is no regular expression.
    TimeoutError: it did not come to an end: no judgement on the completion.
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
    """The soft overlong punishment of Yu et al., "DAPO" (2025), eq. 13: L = num_tokens, M = max_tokens, C = cache_tokens.

    0 if L <= M - C;    ((M - C) - L) / C if M - C < L <= M;    -1 if L > M
    """
    if num_tokens > max_tokens:
        return -1.0
    return min(0.0, (max_tokens - cache_tokens - num_tokens) / cache_tokens)


def cosine(num_tokens: int, max_tokens: int, right: bool) -> float:
    """A right answer is worth more when short, a wrong one less bad when long: Yeo et al., "Demystifying Long
    Chain-of-Thought Reasoning in LLMs" (2025), section 4.2.

        r_L + (r_0 - r_L) (1 + cos(pi L / L_max)) / 2 below L_max, and r_e from L_max on
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
    """The schedule's reward for the length of the completion, and that length in tokens.

    Args:
        schedule: `overlong`, to be added to another reward (`sum`); or `cosine`, a reward by itself.
        max_tokens: the run's limit of generated tokens.
        cache_tokens: of `overlong`: the width of the slope.
        judge: for `cosine`, the reward that says which answer is right (from 1.0 on).
    Raises ValueError: an impossible option, or the judge cannot judge the row.
    """
    slope = cache_tokens if schedule == "overlong" else max_tokens
    if schedule not in SCHEDULES or judge not in JUDGES or not 0 < slope <= max_tokens:
        raise ValueError(
            f"`length` needs a schedule of {', '.join(SCHEDULES)}, a judge of {', '.join(JUDGES)} and 0 < cache_tokens <= "
            f"max_tokens, not {schedule!r}, {judge!r}, {cache_tokens}, {max_tokens}"
        )
    num_tokens = len(sample["completion_token_ids"])
    if schedule == "overlong":
        return {"reward": overlong(num_tokens, max_tokens, cache_tokens), "num_tokens": float(num_tokens)}
    score = exact if judge == "exact" else import_module(f"async_grpo.rewards.builtin.{judge}").score
    right = score(sample)["reward"] >= 1.0
    reward = cosine(num_tokens, max_tokens, right)
    return {"reward": reward, "num_tokens": float(num_tokens), "right": float(right)}
