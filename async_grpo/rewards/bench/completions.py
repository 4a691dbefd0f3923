"""A file of completions, on which rewards are tried.

A line of the file is an object with `completion` and whatever the rewards read; as a rule `answer`. Columns that are
missing are made up: `input` is "", `group_id` the same for the same `input` (without one, of no other row), and without
`completion_token_ids` each character counts as a token, so that rewards of length and of steps have something to count. A
`label`, true or false or a reward, says what is right.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError

LABEL = "label"
MAX_BAD_ROWS = 10  # that are named before the file is refused


@dataclass(frozen=True)
class CompletionRow:
    """A line of the file, as the rewards receive it. `label`: the reward that is right, None if the file has none."""

    line: int
    sample: dict[str, Any]
    label: float | None = None
    has_tokens: bool = True

    @property
    def group(self) -> int | str:
        """The same for all rows that a reward of whole groups sees together."""
        return self.sample["group_id"]


@dataclass
class FileSummary:
    """What a file holds. `group_sizes`: rows by group."""

    rows: int = 0
    with_label: int = 0
    without_tokens: int = 0
    group_sizes: Counter[int | str] = field(default_factory=Counter)


def read_rows(path: str | Path) -> Iterator[CompletionRow]:
    """The rows one by one. Raises ConfigurationError with file and line."""
    for row in _rows_and_problems(path):
        if isinstance(row, ConfigurationError):
            raise row
        yield row


def check_file(path: str | Path) -> FileSummary:
    """Read the whole file.

    Raises:
        ConfigurationError: it cannot be read or holds no rows; or bad ones, the first of which are named.
    """
    summary = FileSummary()
    problems: list[ConfigurationError] = []
    for row in _rows_and_problems(path):
        if isinstance(row, ConfigurationError):
            problems.append(row)
        else:
            summary.rows += 1
            summary.with_label += row.label is not None
            summary.without_tokens += not row.has_tokens
            summary.group_sizes[row.group] += 1
    if problems:
        more = [f"and {len(problems) - MAX_BAD_ROWS} more"] if len(problems) > MAX_BAD_ROWS else []
        raise ConfigurationError("\n".join([*map(str, problems[:MAX_BAD_ROWS]), *more]))
    if not summary.rows:
        raise ConfigurationError(f"{path} holds no completions")
    return summary


def sample_of(row: Mapping[str, Any], completion: str | None = None) -> dict[str, Any]:
    """A full sample of a row; with another completion if one is given. Each character counts as a token.

    >>> sample_of({"answer": "4", "completion": "so 4"}, "5")["completion_token_ids"]
    [53]
    """
    text = str(row["completion"]) if completion is None else completion
    prompt = row.get("input", "")
    sample = {"truncated": False, "group_id": 0, "input": prompt, **row}
    if completion is not None or row.get("completion_token_ids") is None:
        sample["completion_token_ids"] = [ord(character) for character in text]
        sample["completion_char_ends"] = list(range(1, len(text) + 1))
    return sample | {"completion": text, "sample_text": f"{prompt}{text}"}


def _rows_and_problems(path: str | Path) -> Iterator[CompletionRow | ConfigurationError]:
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        yield _row(line, number)
                    except ValueError as error:
                        yield ConfigurationError(f"{path}, line {number}: {error}")
    except OSError as error:
        raise ConfigurationError(f"cannot read the completions {str(path)!r}: {error}") from error


def _row(line: bytes, number: int) -> CompletionRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or brackets without end
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {type(row).__name__}")
    completion, prompt, tokens = row.get("completion"), row.get("input", ""), row.get("completion_token_ids")
    for name, text in (("completion", completion), ("input", prompt)):
        if not isinstance(text, str):
            raise ValueError(f"the column {name} must be text, not {text!r:.80}")
    if tokens is not None and not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
        raise ValueError(f"the column completion_token_ids must be a list of integers, not {tokens!r:.80}")
    group = row.get("group_id")
    if group is None:
        group = _group_of(prompt) if prompt else -number  # a number that no other row has
    if not isinstance(group, int | str):
        raise ValueError(f"the column group_id must be a whole number or text, not {group!r:.80}")
    label = row.pop(LABEL, None)
    if label is not None and not (isinstance(label, int | float) and math.isfinite(label)):
        raise ValueError(f"the column {LABEL} must be true, false or a number, not {label!r:.80}")
    label = None if label is None else float(label)
    return CompletionRow(number, sample_of(row | {"group_id": group}), label, tokens is not None)


def _group_of(prompt: str) -> int:
    return int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:6], "big")
