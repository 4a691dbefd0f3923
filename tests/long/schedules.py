"""Drives the run's controller, and all that it holds, through thousands of random schedules in virtual time.

    python -m tests.long.schedules --schedules 10000
    python -m tests.long.schedules --seed 1234          one of them; if it fails, the shortest that still does

Joins, deaths at any await, stalls, weight swaps, proofs that fail, workers that come late, evaluations and those that are
given up, resampled groups, checkpoints, another controller that goes on with them, and the end of everything at any moment.
`tests/helpers/simulated_run.py` says what must hold. Printed: the seeds that fail, the seconds, what happened how often.
"""

import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import typer
from schedules import Schedule, drawn, shortest
from simulated_run import run_through

AT_ONCE = 50  # of a process


def failure_of(schedule: Schedule) -> str:
    """What goes wrong in it, or ""."""
    try:
        run_through(schedule)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_all(seeds: Sequence[int]) -> tuple[Counter[str], dict[int, str]]:
    """What happened, and what failed, by seed."""
    logging.disable(logging.CRITICAL)
    happened, failures = Counter[str](), dict[int, str]()
    for seed in seeds:
        try:
            happened += run_through(drawn(seed))
        except Exception as error:
            failures[seed] = f"{type(error).__name__}: {error}"
    return happened, failures


def replay(seed: int) -> None:
    schedule = drawn(seed)
    if not (failure := failure_of(schedule)):
        print(f"{schedule}\nholds: {dict(run_through(schedule))}")
        return
    short = shortest(schedule, lambda one: bool(failure_of(one)))
    print(f"{schedule}\nfails: {failure}\nthe shortest that does:\n{short}\nfails: {failure_of(short)}")
    sys.exit(1)


def main(
    schedules: Annotated[int, typer.Option(help="How many.")] = 10_000,
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Replay this one alone.")] = None,
    processes: Annotated[int, typer.Option(help="At once.")] = os.cpu_count() or 1,
) -> None:
    if seed is not None:
        replay(seed)
        return
    happened, failures, begun = Counter[str](), dict[int, str](), time.perf_counter()
    parts: Any = [
        range(begin, min(begin + AT_ONCE, first + schedules))
        for begin in range(first, first + schedules, AT_ONCE)
    ]
    with ProcessPoolExecutor(processes) as pool:
        for some, failed in pool.map(run_all, parts):
            happened += some
            failures |= failed
            for one, why in failed.items():
                print(f"seed {one}: {why[:300]}", flush=True)
    print(f"{schedules} schedules, {len(failures)} fail, {time.perf_counter() - begun:.0f} s")
    for what, times in happened.most_common():
        print(f"{times:8} {what}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
