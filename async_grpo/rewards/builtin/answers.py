r"""What the adapters share: the text to score, the gold answer, the last \boxed{}."""

import re
from typing import Any

_COMMAND = "\\boxed"
_DIVIDER = re.compile(r"[\s$]*(?:,?\s*and|,?\s*or|,)[\s$]*")
_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")


def completion_text(sample: dict[str, Any]) -> str:
    """The generated text without surrounding white space and without one trailing `end_token` of the row.

    >>> completion_text({"completion": "42<eos>\\n", "end_token": "<eos>"})
    '42'
    """
    text = str(sample["completion"]).strip()
    end_token = sample.get("end_token")
    return text.removesuffix(end_token).rstrip() if end_token else text


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} or "\boxed x"; None without one, or if its brace stays open.

    >>> last_boxed(r"\boxed{1}, no: $\boxed{\frac{1}{2}}$")
    '\\frac{1}{2}'
    """
    start = text.rfind(_COMMAND)
    if start < 0:
        return None
    rest = text[start + len(_COMMAND) :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0] or None
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position].strip()
    return None


def last_boxes(text: str) -> str | None:
    r"""The last \boxed{...}, with those before it from which only a comma, "and" or "or" divides it; None without one.

    >>> last_boxes(r"\boxed{1}, no: $\boxed{2}$ and $\boxed{3}$.")
    '\\boxed{2}$ and $\\boxed{3}'
    """
    start, end, position = None, 0, len(text)
    while (position := text.rfind(_COMMAND, 0, position)) >= 0:
        length = _braces_length(text[position + len(_COMMAND) :])
        if length is None or (
            start is not None and not _DIVIDER.fullmatch(text[position + len(_COMMAND) + length : start])
        ):
            break
        end = end or position + len(_COMMAND) + length
        start = position
    return None if start is None else text[start:end]


def _braces_length(text: str) -> int | None:
    """Up to the end of the group that `text` begins with; None if it begins with none, or the group stays open."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0 and not character.isspace():
            return position + 1 if character == "}" else None
    return None


def gold_answer(sample: dict[str, Any]) -> str:
    r"""The row's `answer` as text: what follows the last "####" (GSM8K), or the content of its last \boxed{}.

    Raises:
        ValueError: there is none, it is empty, or it is neither text nor a number.

    >>> gold_answer({"answer": "9 * 113 = 1,017\n#### 1,017"}), gold_answer({"answer": 7.0})
    ('1017', '7')
    """
    answer = sample.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise ValueError(f"the row's answer must be text or a number, not {answer!r}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    text = str(answer).rpartition("####")[2].strip()
    boxed = last_boxed(text)
    text = ungrouped(text if boxed is None else boxed)
    if not text:
        raise ValueError(f"the row's answer {answer!r} is empty: nothing can be compared with it")
    return text


def ungrouped(text: str) -> str:
    """A number without its thousands separators; anything else as it is.

    >>> ungrouped("70,000"), ungrouped("(1,234)"), ungrouped("1,2")
    ('70000', '(1,234)', '1,2')
    """
    return text.replace(",", "") if _GROUPED_NUMBER.fullmatch(text) else text
