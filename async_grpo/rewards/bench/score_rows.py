"""Scores rows of completions through a pool, many at a time, and reports them in their order."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.bench.completions import CompletionRow
from async_grpo.rewards.bench.scorecard import Report
from async_grpo.types import Verdict

OnRow = Callable[[CompletionRow, Sequence[Verdict]], None]
Scored = tuple[CompletionRow, Sequence[Verdict]]  # the verdicts of all runs


class Pool(Protocol):
    """What scores: a `VerifierPool`."""

    async def verify(self, sample: dict[str, Any]) -> Verdict: ...

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict]
    ) -> list[Verdict]: ...


async def score_rows(
    pool: Pool,
    rows: Iterable[CompletionRow],
    report: Report,
    *,
    repeat: int = 1,
    in_flight: int = 256,
    group_sizes: Mapping[int | str, int] | None = None,
    on_row: OnRow = lambda row, verdicts: None,
) -> None:
    """Score every row `repeat` times, and add it to the report.

    The runs over a row follow each other, and meet whatever worker is free. `on_row` is called in the order of the
    rows, with the verdicts of all runs. Rows that wait for the others of their group, or for an earlier row, are held
    in memory.

    Args:
        in_flight: rows that are scored, or wait for a worker, at a time.
        group_sizes: rows by group, where rewards look at whole groups.

    Raises:
        ConfigurationError: `rows` came upon a bad one, or are not those of the `group_sizes`.
        Exception: what the pool or `on_row` raised first.
    """
    incomplete: defaultdict[int | str, dict[int, Scored]] = defaultdict(dict)
    done: dict[int, Scored] = {}
    slots = asyncio.Semaphore(in_flight)
    started, num_reported = time.monotonic(), 0

    async def score(place: int, row: CompletionRow) -> None:
        nonlocal num_reported
        try:
            verdicts = [await pool.verify(row.sample) for _ in range(repeat)]
        finally:
            slots.release()
        group = incomplete[row.group] if group_sizes is not None else {}
        group[place] = row, verdicts
        if group_sizes is None:
            done.update(group)
        elif len(group) == group_sizes.get(row.group, 0):
            done.update(await _looked_at(pool, incomplete.pop(row.group)))
        while num_reported in done:
            finished, in_the_end = done.pop(num_reported)
            num_reported += 1
            runs = [verdict.results for verdict in in_the_end]
            report.add(finished.line, finished.sample["completion"], finished.label, runs)
            on_row(finished, in_the_end)

    try:
        async with asyncio.TaskGroup() as scoring:
            for place, row in enumerate(rows):
                await slots.acquire()
                scoring.create_task(score(place, row))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    if incomplete:
        raise ConfigurationError("the rows were changed while they were scored: a group is not complete")
    report.seconds = time.monotonic() - started


async def _looked_at(pool: Pool, group: Mapping[int, Scored]) -> dict[int, Scored]:
    """The rows of a whole group by their places, with what its rewards make of each run over it."""
    places = sorted(group)  # in the order of the file, not as they happened to be finished
    samples = [group[place][0].sample for place in places]
    runs = zip(*(group[place][1] for place in places), strict=True)
    changed = [await pool.post_process(samples, run) for run in runs]
    by_row = zip(*changed, strict=True)
    return {place: (group[place][0], verdicts) for place, verdicts in zip(places, by_row, strict=True)}
