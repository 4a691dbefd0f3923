"""Do the limits of a remote judge hold over a whole cluster, and how much of them is used?

    python -m tests.long.global_limits --seconds 10
    python -m tests.long.global_limits --seconds 150      # long enough to see whole windows of 60 s

Four processes on two Ray nodes (both on this machine, so that they share a clock) want more than one key gives: requests
per minute, then tokens per minute (drawn from 1 to 200, reserved as 200 and reconciled), then slots. Every call notes
when it started, at the caller. Printed: the rate that was reached (after two seconds), and over every sliding window of W
seconds the most that started in it, against what the rate allows in W seconds. Ends with an error if a limit did not
hold, or if the rate is not within 2 % of the permitted.
"""

import argparse
import asyncio
import bisect
import itertools
import os
import random
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from async_grpo.cluster.rate_limit_actor import RemoteRateLimiter
from async_grpo.cluster.ray_session import zero_cpu_actor
from async_grpo.rewards.http.endpoint import Limits
from async_grpo.rewards.http.rate_limiter import CATCH_UP_FACTOR

NODES, PROCESSES = 2, 4
MAX_TOKENS = 200
WINDOWS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
LEAD_S = 2.0  # not all begin in the same moment, and tokens are reserved before the first are given back
ROOT = Path(__file__).resolve().parents[2]

Call = tuple[float, float, float]  # start, end, tokens used


class Caller:
    """One process that always has more calls waiting than it gets permits."""

    def __init__(self, seed: int) -> None:
        self._rate_limiter, self._draw = RemoteRateLimiter(), random.Random(seed)

    async def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    async def saturate(
        self, key: str, limits: Limits, until: float, waiting: int, lasts_s: float
    ) -> list[Call]:
        calls: list[Call] = []

        async def keep_calling() -> None:
            while True:
                used = float(self._draw.randint(1, MAX_TOKENS))
                permit = await self._rate_limiter.acquire(key, limits, tokens=MAX_TOKENS)
                start = time.monotonic()
                try:
                    await asyncio.sleep(lasts_s)
                finally:
                    calls.append((start, time.monotonic(), used))
                    await self._rate_limiter.release(key, permit, used_tokens=used)

        callers = [asyncio.ensure_future(keep_calling()) for _ in range(waiting)]
        await asyncio.sleep(until - time.monotonic())
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="for each of the three limits")
    parser.add_argument("--requests-per-minute", type=float, default=6000)
    parser.add_argument("--tokens-per-minute", type=float, default=600_000)
    parser.add_argument("--concurrency", type=int, default=8)
    args = parser.parse_args()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"node0": PROCESSES}})
    for i in range(1, NODES):
        cluster.add_node(num_cpus=2, resources={f"node{i}": PROCESSES})
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}}
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
    try:
        callers = [
            zero_cpu_actor(Caller, resources={f"node{i % NODES}": 1}).remote(i) for i in range(PROCESSES)
        ]
        nodes = ray.get([caller.node.remote() for caller in callers])
        _saturate("warm-up", callers, LEAD_S, Limits(requests_per_minute=args.requests_per_minute), 50, 0.02)
        print(f"{PROCESSES} processes on {len(set(nodes))} nodes, {args.seconds:g} s for each limit")
        wrong = [
            *_rate("requests", callers, args.seconds, Limits(requests_per_minute=args.requests_per_minute)),
            *_rate("tokens", callers, args.seconds, Limits(tokens_per_minute=args.tokens_per_minute)),
            *_slots(callers, args.seconds, Limits(concurrency=args.concurrency)),
        ]
    finally:
        ray.shutdown()
        cluster.shutdown()
    if wrong:
        raise SystemExit("; ".join(wrong))


def _saturate(
    key: str, callers: list, seconds: float, limits: Limits, waiting: int, lasts_s: float
) -> list[Call]:
    until = time.monotonic() + LEAD_S + seconds
    calls = ray.get([c.saturate.remote(key, limits, until, waiting, lasts_s) for c in callers])
    return sorted(itertools.chain.from_iterable(calls))


def _rate(key: str, callers: list, seconds: float, limits: Limits) -> list[str]:
    """Saturate and report one rate; returns what is wrong with it."""
    calls = _saturate(key, callers, seconds, limits, waiting=50, lasts_s=0.02)
    starts = [start for start, _, _ in calls]
    if key == "tokens":
        per_minute, costs, largest = limits.tokens_per_minute, [used for _, _, used in calls], MAX_TOKENS
    else:
        per_minute, costs, largest = limits.requests_per_minute, [1.0] * len(calls), 1
    sums = [0.0, *itertools.accumulate(costs)]
    permitted = per_minute / 60.0
    first, last = (bisect.bisect_left(starts, starts[-1] - s) for s in (seconds, 0.0))
    reached = (sums[last] - sums[first]) / seconds
    print(f"{key}: permitted {permitted:.1f}/s, reached {reached:.1f}/s = {100 * reached / permitted:.2f} %")
    wrong = [] if abs(reached / permitted - 1) <= 0.02 else [f"{key}: {reached:.1f}/s of {permitted:.1f}/s"]
    for width_s in (w for w in WINDOWS_S if w <= seconds):
        ends = [bisect.bisect_left(starts, start + width_s) for start in starts]
        most, worst = max((sums[end] - sums[i], starts[i] - starts[0]) for i, end in enumerate(ends))
        bound = CATCH_UP_FACTOR * permitted * (width_s + limits.burst_s + limits.slack_s) + largest
        if width_s == 60.0:
            bound = per_minute
        print(
            f"  any {width_s:4g} s: at most {most:8.0f} = {100 * most / permitted / width_s:6.2f} % of rate x W "
            f"(bound {bound:.0f}; from second {worst:.1f})"
        )
        if most > bound:
            wrong.append(f"{key}: {most:.0f} started within {width_s:g} s, more than {bound:.0f}")
    return wrong


def _slots(callers: list, seconds: float, limits: Limits) -> list[str]:
    calls = _saturate("slots", callers, seconds, limits, waiting=20, lasts_s=0.05)
    changes = sorted([(start, 1) for start, _, _ in calls] + [(end, -1) for _, end, _ in calls])
    most = max(itertools.accumulate(change for _, change in changes))
    busy = sum(end - start for start, end, _ in calls) / (calls[-1][1] - calls[0][0])
    print(f"slots: {limits.concurrency} permitted, at most {most} at once, {busy:.2f} busy on average")
    return [] if most <= limits.concurrency else [f"slots: {most} at once"]


if __name__ == "__main__":
    main()
