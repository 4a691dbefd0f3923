"""Measure what the VerifierPool costs: math_verify against processes that call the library directly, and a trivial reward.

    python -m benchmarks.pool_throughput --processes 2 --samples 3000

It prints samples per second of both and their ratio (at least 0.85), and the overhead per call of a trivial reward with
64 samples in flight (below 1 ms). The two are measured in turns, and the best of each counts, because other programs
can only make them slower.
"""

import argparse
import asyncio
import multiprocessing
import time
from pathlib import Path

from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.pool import VerifierPool

ROOT = Path(__file__).resolve().parent.parent
PAGE = """
def trivial(sample):
    return {"reward": 1.0}

REWARD_ADAPTERS = {"trivial": trivial}
"""


def samples(count: int) -> list[dict]:
    """Return samples in the style of a data set of mathematics. Half of them are right."""
    return [
        {
            "completion": rf"Adding, \frac{{{i}}}{{7}} simplifies, so the answer is \boxed{{\frac{{{2 * i}}}{{14}}}}.",
            "answer": rf"\frac{{{i + i % 2}}}{{7}}",
            "completion_token_ids": [],
            "input": "",
        }
        for i in range(1, count + 1)
    ]


def _plain_worker(part: list[dict], ready, start, total) -> None:
    from async_grpo.rewards.builtin.math_verify import score

    score({"completion": r"\boxed{1}", "answer": "1"})
    ready.release()
    start.wait()
    rewards = sum(score(sample)["reward"] for sample in part)
    with total.get_lock():
        total.value += rewards


def plain(rows: list[dict], processes: int) -> tuple[float, float]:
    """Return (seconds, sum of rewards) of processes that call the library in a loop."""
    context = multiprocessing.get_context("spawn")
    ready, start, total = context.Semaphore(0), context.Event(), context.Value("d", 0.0)
    workers = [
        context.Process(target=_plain_worker, args=(rows[number::processes], ready, start, total))
        for number in range(processes)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    began = time.perf_counter()
    start.set()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began, total.value


async def pooled(
    source: RewardRegistrySource, adapter: str, rows: list[dict], processes: int, in_flight: int
) -> tuple[float, float]:
    """Return (seconds, sum of rewards) of the pool with `in_flight` samples at a time."""

    async def make(name: str) -> AdapterProcess:
        return await AdapterProcess(source, name).start()

    pool = VerifierPool([adapter], make, workers=processes)
    await pool.start()
    gate, rewards = asyncio.Semaphore(in_flight), []

    async def one(row: dict) -> None:
        async with gate:
            rewards.append((await pool.verify(row)).reward)

    began = time.perf_counter()
    await asyncio.gather(*map(one, rows))
    seconds = time.perf_counter() - began
    await pool.close()
    return seconds, sum(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows, page = samples(args.samples), RewardRegistrySource.from_file(ROOT / "reward_registry.py")
    ours, theirs = [], []
    for _ in range(args.rounds):
        seconds, expected = plain(rows, args.processes)
        theirs.append(args.samples / seconds)
        seconds, rewards = asyncio.run(pooled(page, "math_verify", rows, args.processes, 64))
        assert rewards == expected, f"the pool's rewards sum to {rewards}, the library's to {expected}"
        ours.append(args.samples / seconds)
    ratio = max(ours) / max(theirs)
    print(
        f"math_verify, {args.processes} processes: plain {max(theirs):.0f}/s, pool {max(ours):.0f}/s, ratio {ratio:.2f}"
    )
    trivial = RewardRegistrySource("trivial_page", PAGE)
    seconds, _ = min(
        asyncio.run(pooled(trivial, "trivial", rows, args.processes, 64)) for _ in range(args.rounds)
    )
    overhead_ms = 1000 * seconds / args.samples
    print(f"a trivial reward, 64 in flight: {overhead_ms:.3f} ms per call")
    raise SystemExit(not (ratio >= 0.85 and overhead_ms < 1.0))


if __name__ == "__main__":
    main()
