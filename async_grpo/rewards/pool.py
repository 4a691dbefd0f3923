"""VerifierPool: every adapter scores every sample, each with its own queue and workers, and nothing is lost.

    pool = VerifierPool(["mathd", "sympy"], process_maker(source), workers=2)
    await pool.start()
    verdict = await pool.verify({"completion": ..., "answer": ..., ...})

The workers themselves are somebody else's: processes here (`process.process_maker`), actors elsewhere, judges.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter_queue import AdapterQueue
from async_grpo.rewards.combine import Combination
from async_grpo.rewards.verifier_worker import MakeWorker, Timeouts, VerifierWorker
from async_grpo.types import AdapterResult, RewardStatus, Verdict

__all__ = ["VerifierPool", "VerifierWorker"]

TRAINING, EVALUATION = "train", "eval"
Score = Callable[[dict[str, Any]], Awaitable[AdapterResult]]
Around = Callable[[str, dict[str, Any], str, Score], Awaitable[AdapterResult]]


class VerifierPool:
    """Scores samples with its adapters. Plain asyncio: use it from one event loop.

    Training and evaluation have lanes and workers of their own, so that neither waits behind the other; those of
    evaluation are made at its first sample.

    Args:
        adapters: names, as `make_worker` understands them.
        make_worker: makes a started worker of one adapter, here or on another machine.
        make_evaluator: the same for evaluation, where it makes a difference to the worker.
        workers: how many, for all adapters alike or by name (1 where none is given).
        evaluation_workers: the same, for evaluation.
        combination: how the results of a sample become its verdict (default: the best).
        fallbacks: adapter -> the one that is asked in its place when it failed or timed out.
        around: wraps every call of an adapter, for a cache, a budget or traffic limits; gets the adapter's name, the
            sample, the lane, and the call itself.
        timeout_s: for scoring one sample, from when a worker takes it; time in the queue is measured apart.
        grace_s: how much longer than two time-outs and the start of a process a worker may be silent before it is
            fenced, and the deadline for closing it.
        make_timeout_s, backoff_s, regrow_s: for making one worker, before each attempt to make one, and between
            attempts to make one that was given up.

    Raises:
        ConfigurationError: no adapter, one named twice, or an impossible number of workers.
    """

    def __init__(
        self,
        adapters: Sequence[str],
        make_worker: MakeWorker,
        *,
        workers: Mapping[str, int] | int = 1,
        evaluation_workers: Mapping[str, int] | int = 1,
        make_evaluator: MakeWorker | None = None,
        combination: Combination | None = None,
        fallbacks: Mapping[str, str] | None = None,
        around: Around | None = None,
        timeout_s: float = 30.0,
        grace_s: float = 10.0,
        make_timeout_s: float = 120.0,
        backoff_s: Sequence[float] = (0.0, 1.0, 5.0),
        regrow_s: float = 30.0,
    ) -> None:
        self._fallbacks, self._around = dict(fallbacks or {}), around
        all_adapters = tuple(dict.fromkeys([*adapters, *self._fallbacks.values()]))
        timeouts = Timeouts(timeout_s, grace_s, make_timeout_s, tuple(backoff_s), regrow_s)
        counts = {TRAINING: _worker_counts(adapters, all_adapters, workers)}
        counts[EVALUATION] = _worker_counts(adapters, all_adapters, evaluation_workers)
        if unknown := sorted(set(self._fallbacks) - set(adapters)):
            raise ConfigurationError(
                f"a fallback is given for {', '.join(unknown)}, which is no adapter of the run"
            )
        self._combination = combination or Combination(tuple(adapters))
        makers = {TRAINING: make_worker, EVALUATION: make_evaluator or make_worker}
        self._lanes = {
            lane: {name: AdapterQueue(name, makers[lane], count, timeouts) for name, count in by_name.items()}
            for lane, by_name in counts.items()
        }
        self._starting: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Make all workers of training; none is left behind if one cannot be made.

        Raises:
            ConfigurationError: the user's page cannot work.
            Exception: what the last attempt to make a worker raised.
        """
        try:
            await self._started(TRAINING)
        except BaseException:
            await self.close()
            raise

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """The combined verdict. Never raises for an adapter's failure; may be cancelled."""
        lane = EVALUATION if evaluation else TRAINING
        if evaluation:
            await self._started(EVALUATION)
        return await self._combination(sample, lambda name: self._ask(name, sample, lane))

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """The verdicts of a whole group after each adapter has looked at all of its own results.

        For adapters with `post_process_scores`; the others are not asked.
        """
        if evaluation:  # the verdicts may be of a pool before this one
            await self._started(EVALUATION)
        lanes = self._lanes[EVALUATION if evaluation else TRAINING]
        changed: list[dict[str, AdapterResult]] = [{} for _ in samples]
        for name in [name for name in self._combination.adapters if lanes[name].has_post_process]:
            found = [
                (number, result)
                for number, verdict in enumerate(verdicts)
                for result in verdict.results
                if result.adapter == name
            ]
            asked = [samples[number] for number, _ in found]
            if found:
                results = await lanes[name].post_process(asked, [result for _, result in found])
                for (number, _), result in zip(found, results, strict=True):
                    changed[number][name] = result
        return [
            self._combination.verdict([results.get(r.adapter, r) for r in verdict.results])
            for verdict, results in zip(verdicts, changed, strict=True)
        ]

    async def close(self) -> None:
        """Cancel what runs, fail what waits, close every worker; bounded by a few `grace_s`."""
        await asyncio.gather(*(lane.close() for lanes in self._lanes.values() for lane in lanes.values()))

    def stats(self) -> dict[str, dict[str, Any]]:
        """By adapter: counts and seconds since the last `take_stats`, and the queue and workers of now."""
        return {
            name if kind == TRAINING else f"{name} (evaluation)": lane.stats.as_dict()
            | {"queue_depth": lane.queue_depth, "workers": lane.num_workers}
            for kind, lanes in self._lanes.items()
            if kind in self._starting or kind == TRAINING
            for name, lane in lanes.items()
        }

    def take_stats(self) -> dict[str, dict[str, Any]]:
        """`stats`, and begin anew: for one line per step."""
        stats = self.stats()
        for lanes in self._lanes.values():
            for lane in lanes.values():
                lane.stats.reset()
        return stats

    async def _started(self, kind: str) -> None:
        """Start the lanes of a kind once; whoever comes meanwhile waits for the same start."""
        if kind not in self._starting or has_failed(self._starting[kind]):
            self._starting[kind] = asyncio.create_task(self._start(kind))
        await asyncio.shield(self._starting[kind])

    async def _start(self, kind: str) -> None:
        starts = [lane.start() for lane in self._lanes[kind].values()]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        if errors := [outcome for outcome in outcomes if outcome is not None]:
            raise errors[0]

    async def _ask(self, name: str, sample: dict[str, Any], kind: str) -> AdapterResult:
        result = await self._call(name, sample, kind)
        fallback = self._fallbacks.get(name)
        if fallback is None or result.status not in (RewardStatus.FAILED, RewardStatus.TIMED_OUT):
            return result
        answer = await self._call(fallback, sample, kind)
        # Under the name of the adapter it stands in for, or weights and constants would not find it
        return answer.standing_in_for(result)

    async def _call(self, name: str, sample: dict[str, Any], kind: str) -> AdapterResult:
        lane = self._lanes[kind][name]
        if self._around is None:
            return await lane.score(sample)
        return await self._around(name, sample, kind, lane.score)


def has_failed(start: asyncio.Task[None]) -> bool:
    """Whether it has failed. What was in the way may have passed: who comes next starts anew."""
    return start.done() and (start.cancelled() or start.exception() is not None)


def _worker_counts(
    adapters: Sequence[str], all_adapters: Sequence[str], workers: Mapping[str, int] | int
) -> dict[str, int]:
    if not adapters or len(set(adapters)) != len(adapters):
        raise ConfigurationError(f"a verifier pool needs adapters, each once, not {list(adapters)}")
    by_name = dict.fromkeys(all_adapters, workers) if isinstance(workers, int) else dict(workers)
    if unknown := sorted(set(by_name) - set(all_adapters)):
        raise ConfigurationError(
            f"workers asked for {', '.join(unknown)}, but the adapters are {list(adapters)}"
        )
    counts = {name: by_name.get(name, 1) for name in all_adapters}
    if min(counts.values()) < 1:
        raise ConfigurationError(f"every adapter needs at least one worker, not {counts}")
    return counts
