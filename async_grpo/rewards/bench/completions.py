"""A file of completions, on which rewards are tried, and the scoring of its rows. `VerifyConfig.file` names its columns.

Those that are missing are made up: `input` is "", `group_id` the same for the same `input` (without one, of no other row),
and without `completion_token_ids` each character counts as a token, so that lengths and steps can be judged.
"""

import asyncio
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.result import is_finite_number
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import Verdict

LABEL = "label"
IN_FLIGHT = 256  # rows


@dataclass(frozen=True)
class CompletionRow:
    """A line of the file. `label`: the reward that is right, None if the file has none."""

    line: int
    columns: dict[str, Any]
    label: float | None = None


def read_rows(path: str | Path) -> list[CompletionRow]:
    """All rows of the file. Raises ConfigurationError: it cannot be read or holds no rows, or a bad one at a named line."""
    rows, number = [], 0
    try:
        with Path(path).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row(line, number))
    except OSError as error:
        raise ConfigurationError(f"cannot read the completions {str(path)!r}: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not rows:
        raise ConfigurationError(f"{path} holds no completions")
    return rows


def sample_of(row: Mapping[str, Any], completion: str | None = None) -> dict[str, Any]:
    """A full sample of a row; with another completion if one is given. Each character counts as a token."""
    text = str(row["completion"]) if completion is None else completion
    prompt = row.get("input", "")
    sample = {"truncated": False, "group_id": 0, "input": prompt, **row}
    if completion is not None or row.get("completion_token_ids") is None:
        sample["completion_token_ids"] = [ord(character) for character in text]
        sample["completion_char_ends"] = list(range(1, len(text) + 1))
    return sample | {"completion": text, "sample_text": f"{prompt}{text}"}


def _row(line: bytes, number: int) -> CompletionRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or brackets without end
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {type(row).__name__}")
    completion, prompt, tokens = row.get("completion"), row.get("input", ""), row.get("completion_token_ids")
    group, label = row.get("group_id"), row.pop(LABEL, None)
    are_tokens = tokens is None or (isinstance(tokens, list) and all(type(token) is int for token in tokens))
    for name, wanted, value, is_right in (
        ("completion", "text", completion, isinstance(completion, str)),
        ("input", "text", prompt, isinstance(prompt, str)),
        ("completion_token_ids", "a list of integers", tokens, are_tokens),
        ("group_id", "a whole number or text", group, isinstance(group, int | str | None)),
        (LABEL, "true, false or a number", label, label is None or is_finite_number(label)),
    ):
        if not is_right:
            raise ValueError(f"the column {name} must be {wanted}, not {value!r:.80}")
    if group is None:  # without a prompt, a number that no other row has
        digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()
        group = int.from_bytes(digest[:6], "big") if prompt else -number
    return CompletionRow(number, row | {"group_id": group}, None if label is None else float(label))


async def score_rows(
    pool: VerifierPool,
    rows: Sequence[CompletionRow],
    on_row: Callable[[CompletionRow, Sequence[Verdict]], None],
    repeat: int,
) -> None:
    """Score every row `repeat` times, one run after the other, and let the rewards look at whole groups.

    `on_row` is called in the order of the rows, with the verdicts of all runs.
    Raises Exception: what the pool or `on_row` raised first.
    """
    slots = asyncio.Semaphore(IN_FLIGHT)
    groups: defaultdict[int | str, list[CompletionRow]] = defaultdict(list)
    for row in rows:
        groups[row.columns["group_id"]].append(row)

    async def verify(row: CompletionRow) -> list[Verdict]:
        async with slots:
            sample = sample_of(row.columns)
            return [await pool.verify(sample) for _ in range(repeat)]

    async def score(group: Sequence[CompletionRow]) -> Iterator[Sequence[Verdict]]:
        runs = zip(*await asyncio.gather(*map(verify, group)), strict=True)
        samples = [sample_of(row.columns) for row in group]
        return zip(*[await pool.post_process(samples, run) for run in runs], strict=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            scored = {name: tasks.create_task(score(group)) for name, group in groups.items()}
            for row in rows:
                on_row(row, next(await scored[row.columns["group_id"]]))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
