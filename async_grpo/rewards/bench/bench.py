"""The bench: rewards on a file of completions, through the real pool, to see what they do before a run needs them.

A line of the file is an object with `completion` and whatever the rewards read; as a rule `answer`. Columns that are
missing are made up: `input` is "", `group_id` the same for the same `input` (without one, of no other row), and without
`completion_token_ids` each character counts as a token, so that rewards of length and of steps have something to count. A
`label`, true or false or a reward, says what is right.
"""

import asyncio
import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.bench.scorecard import LABEL, Report
from async_grpo.types import Verdict

MAX_BAD_ROWS = 10  # that are named before the file is refused

Verify = Callable[[dict[str, Any]], Awaitable[Verdict]]
PostProcess = Callable[[Sequence[dict[str, Any]], Sequence[Verdict]], Awaitable[list[Verdict]]]
OnRow = Callable[["BenchRow", Sequence[Verdict]], None]
Scored = tuple["BenchRow", Sequence[Verdict]]  # the verdicts of all runs


@dataclass(frozen=True)
class BenchRow:
    """A line of the file, as the rewards receive it. `label`: the reward that is right, None if nobody says."""

    line: int
    sample: dict[str, Any]
    label: float | None
    has_tokens: bool

    @property
    def group(self) -> int | str:
        """The same for all rows that a reward of whole groups sees together."""
        return self.sample["group_id"]  # type: ignore[no-any-return]


def read_rows(path: str | Path) -> Iterator[BenchRow]:
    """The rows one by one. Raises ConfigurationError with file and line."""
    for row in _rows_and_problems(path):
        if isinstance(row, ConfigurationError):
            raise row
        yield row


def check_rows(path: str | Path) -> Counter[str]:
    """Read the whole file: how many `rows`, how many `with_label`, how many `without_tokens`.

    Raises:
        ConfigurationError: it cannot be read or holds no rows; or bad ones, the first of which are named.
    """
    counts: Counter[str] = Counter()
    problems: list[ConfigurationError] = []
    for row in _rows_and_problems(path):
        if isinstance(row, ConfigurationError):
            problems.append(row)
        else:
            counts.update(rows=1, with_label=row.label is not None, without_tokens=not row.has_tokens)
    if problems:
        more = [f"and {len(problems) - MAX_BAD_ROWS} more"] if len(problems) > MAX_BAD_ROWS else []
        raise ConfigurationError("\n".join([*map(str, problems[:MAX_BAD_ROWS]), *more]))
    if not counts:
        raise ConfigurationError(f"{path} holds no completions")
    return counts


class Groups:
    """Has rewards look at whole groups, as in training. `waiting`: rows whose group is not complete, by its name.

    Args:
        path: of the file; read once more, for the sizes of the groups.
        post_process: `VerifierPool.post_process`.

    Raises:
        ConfigurationError: as `read_rows`.
    """

    def __init__(self, path: str | Path, post_process: PostProcess) -> None:
        self._sizes = Counter(row.group for row in read_rows(path))
        self._post_process = post_process
        self.waiting: defaultdict[int | str, dict[int, Scored]] = defaultdict(dict)

    async def add(self, place: int, row: BenchRow, verdicts: Sequence[Verdict]) -> dict[int, Scored]:
        """Place by place the rows of this one's group, with what is said of each in the end; none before the last came."""
        group = self.waiting[row.group]
        group[place] = row, verdicts
        if len(group) < self._sizes[row.group]:
            return {}
        places = sorted(
            self.waiting.pop(row.group)
        )  # the rows in their order, not as they happened to be finished
        rows, runs_by_row = zip(*(group[place] for place in places), strict=True)
        samples = [row.sample for row in rows]
        runs = [await self._post_process(samples, run) for run in zip(*runs_by_row, strict=True)]
        return dict(zip(places, zip(rows, zip(*runs, strict=True), strict=True), strict=True))


async def run_bench(
    verify: Verify,
    rows: Iterable[BenchRow],
    report: Report,
    *,
    repeat: int = 1,
    in_flight: int = 256,
    groups: Groups | None = None,
    on_row: OnRow = lambda row, verdicts: None,
) -> None:
    """Score every row `repeat` times, and add it to the report.

    The runs over a row follow each other, and meet whatever worker is free. `on_row` is called in the order of the
    rows, with the verdicts of all runs. Rows that wait for the others of their group, or for an earlier row, are held
    in memory.

    Args:
        verify: scores a sample, `VerifierPool.verify`.
        in_flight: rows that are scored, or wait for a worker, at a time.
        groups: where rewards look at whole groups.

    Raises:
        ConfigurationError: `rows` came upon a bad one, or are not those of which `groups` knows.
        Exception: what `verify`, `groups` or `on_row` raised first.
    """
    done: dict[int, Scored] = {}
    slots = asyncio.Semaphore(in_flight)
    started, num_reported = time.monotonic(), 0

    async def score(place: int, row: BenchRow) -> None:
        nonlocal num_reported
        try:
            verdicts = [await verify(row.sample) for _ in range(repeat)]
        finally:
            slots.release()
        done.update(
            await groups.add(place, row, verdicts) if groups is not None else {place: (row, verdicts)}
        )
        while num_reported in done:
            finished, verdicts = done.pop(num_reported)
            num_reported += 1
            runs = [verdict.results for verdict in verdicts]
            report.add(finished.line, finished.sample["completion"], finished.label, runs)
            on_row(finished, verdicts)

    try:
        async with asyncio.TaskGroup() as scoring:
            for place, row in enumerate(rows):
                await slots.acquire()
                scoring.create_task(score(place, row))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if groups is not None and groups.waiting:
        raise ConfigurationError("the rows were changed while they were scored: a group is not complete")
    report.seconds = time.monotonic() - started


def _rows_and_problems(path: str | Path) -> Iterator[BenchRow | ConfigurationError]:
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


def _row(line: bytes, number: int) -> BenchRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or brackets without end
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"a row must be an object, not {type(row).__name__}")
    completion, prompt = row.get("completion"), row.get("input", "")
    if not isinstance(completion, str):
        raise ValueError(f"the column completion must be text, not {completion!r:.80}")
    if not isinstance(prompt, str):
        raise ValueError(f"the column input must be text, not {prompt!r:.80}")
    tokens = row.get("completion_token_ids")
    if tokens is not None and not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
        raise ValueError(f"the column completion_token_ids must be a list of integers, not {tokens!r:.80}")
    group = row.get("group_id")
    if group is None:
        group = _group_of(prompt) if prompt else -number  # a number that no other row has
    if not isinstance(group, int | str):
        raise ValueError(f"the column group_id must be a whole number or text, not {group!r:.80}")
    sample = {
        "truncated": False,
        **{name: value for name, value in row.items() if name != LABEL},
        "group_id": group,
        "input": prompt,
        "sample_text": prompt + completion,
    }
    if tokens is None:
        sample["completion_token_ids"] = [ord(character) for character in completion]
        sample["completion_char_ends"] = list(range(1, len(completion) + 1))
    return BenchRow(number, sample, _label(row.get(LABEL)), tokens is not None)


def _label(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the column {LABEL} must be true, false or a number, not {value!r:.80}")
    return float(value)


def _group_of(prompt: str) -> int:
    return int.from_bytes(hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[:6], "big")
