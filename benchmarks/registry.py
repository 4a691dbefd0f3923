"""Measure what the worker registry costs: one decision among a thousand workers, and thousands of callers that wait.

    python -m benchmarks.registry
    python -m benchmarks.registry --workers 8 --waiters 5000

It prints the CPU time of this process in a table: an admission that finds room (the decision, its lease, and the
release of the lease; `bare` is the decision alone), an admission that has waited in line, and the fraction of a core
that waiting takes.
"""

import asyncio
import random
import time
from typing import Annotated

import typer

from async_grpo.experience.worker_registry import Lease, WorkerRegistry
from async_grpo.messages import WorkerInfo

MAX_SEQUENCES, MAX_TOKENS = 64, 100_000


def registry_of(workers: int) -> WorkerRegistry:
    registry = WorkerRegistry("generation")
    for number in range(workers):
        registry.register(WorkerInfo(f"w{number}", "generation", MAX_SEQUENCES, MAX_TOKENS))
        registry.activate(f"w{number}")
    return registry


async def admissions(workers: int, rounds: int) -> dict[str, float]:
    """Return the microseconds of admissions of groups of 8 with few or many tokens. Half of the places are in use."""
    registry, draw = registry_of(workers), random.Random(0)
    for _ in range(workers * MAX_SEQUENCES // 16):
        await registry.acquire(8, draw.randint(100, 1000))
    requests = [draw.randint(100, 1000) for _ in range(rounds)]
    begun = time.process_time()
    for tokens in requests:
        registry.release(await registry.acquire(8, tokens), 8)
    admission = time.process_time() - begun
    begun = time.process_time()
    for tokens in requests:
        registry._choose(8, 8 * tokens)
    bare = time.process_time() - begun
    return {"admission": admission / rounds * 1e6, "bare decision": bare / rounds * 1e6}


async def line(workers: int, waiters: int, idle_s: float) -> dict[str, float]:
    """Return the CPU cost of callers that wait for full workers.

    `idle` is the fraction of a core while nothing happens. `served` is the microseconds of each caller that gets a place.
    """
    registry = registry_of(workers)
    held: list[Lease] = [await registry.acquire(MAX_SEQUENCES, 1) for _ in range(workers)]
    waiting = [asyncio.create_task(registry.acquire(8, 500)) for _ in range(waiters)]
    await asyncio.sleep(0)
    begun, since = time.process_time(), time.perf_counter()
    await asyncio.sleep(idle_s)
    idle = (time.process_time() - begun) / (time.perf_counter() - since)
    begun = time.process_time()
    for task in waiting:
        while not task.done():
            lease = held[0]
            registry.release(lease)
            if not lease.sequences:
                held.pop(0)
            await asyncio.sleep(0)
        held.append(task.result())
    return {"idle": idle, "served": (time.process_time() - begun) / waiters * 1e6}


def main(
    workers: Annotated[int, typer.Option(help="Registered workers.")] = 1024,
    waiters: Annotated[int, typer.Option(help="Callers that wait for a place.")] = 5000,
    rounds: Annotated[int, typer.Option(help="Admissions that are timed.")] = 20_000,
    idle_s: Annotated[float, typer.Option(help="Seconds in which the callers only wait.")] = 5.0,
) -> None:
    taken = asyncio.run(admissions(workers, rounds))
    waited = asyncio.run(line(workers, waiters, idle_s))
    print(f"| {workers} workers | CPU |\n|---|---|")
    for name, microseconds in taken.items():
        print(f"| {name} | {microseconds:.1f} us |")
    print(f"| {waiters} waiting callers, idle | {waited['idle']:.3%} of a core |")
    print(f"| one of them served, 8 places given back one by one | {waited['served']:.1f} us |")


if __name__ == "__main__":
    typer.run(main)
