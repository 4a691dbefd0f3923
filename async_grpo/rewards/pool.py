"""VerifierPool: every adapter scores every sample, each with its own queue and workers, and nothing is lost."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from async_grpo.errors import ConfigurationError
from async_grpo.processes.waits import waiting
from async_grpo.rewards.adapter_queue import AdapterQueue
from async_grpo.rewards.combine import Combination
from async_grpo.rewards.judges.remote_judge import JudgeAddresses
from async_grpo.rewards.local_workers import LocalWorkers
from async_grpo.rewards.standalone import TRLReward
from async_grpo.rewards.verifier_worker import MakeWorker, Timeouts
from async_grpo.types import AdapterResult, Verdict

TRAINING, EVALUATION = "train", "eval"  # the phases of a run

Score = Callable[[dict[str, Any]], Awaitable[AdapterResult]]
Middleware = Callable[[str, dict[str, Any], str, Score], Awaitable[AdapterResult]]


class VerifierPool:
    """Scores samples with its adapters. Plain asyncio: use it from one event loop.

    Training and evaluation have queues and workers of their own, so that neither waits behind the other; those of
    evaluation are made at its first sample.

    Args:
        adapters: names, as `make_worker` understands them.
        make_worker: makes a started worker of one adapter, here or on another machine.
        make_evaluator: the same for evaluation, where it makes a difference to the worker.
        workers: how many, for all adapters alike or by name (1 where none is given).
        evaluation_workers: the same, for evaluation.
        combination: how the results of a sample become its verdict (default: the best).
        fallbacks: adapter -> the one that is asked in its place when it failed or timed out.
        middleware: wraps every call of an adapter, for a cache or a budget; gets the adapter's name, the sample, the
            phase ("train" or "eval"), and the call itself.
        timeout_s: for scoring one sample, from when a worker takes it; time in the queue is measured apart.
        more_timeouts: further fields of `verifier_worker.Timeouts`.

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
        middleware: Middleware | None = None,
        timeout_s: float = 30.0,
        **more_timeouts: Any,
    ) -> None:
        self._fallbacks, self._middleware = dict(fallbacks or {}), middleware
        all_adapters = tuple(dict.fromkeys([*adapters, *self._fallbacks.values()]))
        if unknown := ", ".join(sorted(set(self._fallbacks) - set(adapters))):
            raise ConfigurationError(f"a fallback is given for {unknown}, which is no adapter of the run")
        self._combination = combination or Combination(tuple(adapters))
        timeouts = Timeouts(timeout_s, **more_timeouts)

        def queues(make: MakeWorker, wanted: Mapping[str, int] | int) -> dict[str, AdapterQueue]:
            counts = _worker_counts(all_adapters, wanted).items()
            return {name: AdapterQueue(name, make, count, timeouts) for name, count in counts}

        self._queues = {
            TRAINING: queues(make_worker, workers),
            EVALUATION: queues(make_evaluator or make_worker, evaluation_workers),
        }
        self._starting: dict[str, asyncio.Task[None]] = {}

    @classmethod
    def from_registry(
        cls,
        adapters: str | Sequence[str],
        registry: str | Path | None = None,
        *,
        reward_options: Mapping[str, Any] | None = None,
        reward_env: str | Sequence[str] = (),
        judge_addresses: JudgeAddresses | None = None,
        **settings: Any,
    ) -> Self:
        """A pool of this machine alone, without a trainer, a run or Ray.

        Args:
            adapters: rewards and judges of the registry file, or FILE.py:NAME.
            registry: the registry file; default: `reward_registry.py` here, or else the one that is shipped.
            reward_options: keyword options; a reward receives those that it names.
            reward_env: environment variables of this process that the rewards' processes get as well.
            judge_addresses: of the judges whose entry says no `url`.
            settings: further arguments of this class.

        ConfigurationError, or by `start`: a file, a reward's name, an option or a variable cannot be used.
        """
        workers = LocalWorkers(adapters, registry, reward_options, reward_env, judge_addresses)
        return cls(workers.adapters, workers.make, **settings)

    @property
    def adapters(self) -> tuple[str, ...]:
        return self._combination.adapters

    def as_trl_reward(self) -> TRLReward:
        """This pool as a reward function for TRL's trainers (see `TRLReward`)."""
        return TRLReward(self)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Make all workers of training. Raises what the last attempt to make one raised, and leaves none behind."""
        try:
            await self._started(TRAINING)
        except BaseException:
            await self.close()
            raise

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """The combined verdict. Never raises for an adapter's failure; may be cancelled."""
        phase = EVALUATION if evaluation else TRAINING
        if evaluation:
            await self._started(EVALUATION)
        in_turn = all(queue.inline for queue in self._queues[phase].values())
        return await self._combination(sample, partial(self._score, sample, phase), in_turn)

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """The verdicts of a whole group, after each adapter with `post_process_scores` has looked at all its results."""
        if evaluation:  # the verdicts may be of a pool before this one
            await self._started(EVALUATION)
        queues = self._queues[EVALUATION if evaluation else TRAINING]
        changed = [{result.adapter: result for result in verdict.results} for verdict in verdicts]
        for name in [name for name in self._combination.adapters if queues[name].stats.has_hook]:
            if members := [number for number, results in enumerate(changed) if name in results]:
                asked = [samples[number] for number in members]
                results = await queues[name].post_process(asked, [changed[n][name] for n in members])
                for number, result in zip(members, results, strict=True):
                    changed[number][name] = result
        return [self._combination.verdict(tuple(results.values())) for results in changed]

    async def close(self) -> None:
        """Cancel what runs, fail what waits, close every worker; bounded by a few `grace_s`."""
        queues = [queue for by_name in self._queues.values() for queue in by_name.values()]
        await asyncio.gather(*(queue.close() for queue in queues))

    def stats(self) -> dict[str, dict[str, Any]]:
        """By adapter: counts and seconds since the last `take_stats`, and the queue and workers of now."""
        return {name: queue.counts() for name, queue in self._named_queues()}

    def take_stats(self) -> dict[str, dict[str, Any]]:
        """`stats`, and begin anew: for one line per step. Judges add the counts of their requests."""
        return {name: queue.take_counts() for name, queue in self._named_queues()}

    def _named_queues(self) -> list[tuple[str, AdapterQueue]]:
        """Those of training, and of evaluation, if there is any."""
        named = list(self._queues[TRAINING].items())
        if EVALUATION in self._starting:
            named += [(f"{name} (evaluation)", queue) for name, queue in self._queues[EVALUATION].items()]
        return named

    async def _started(self, phase: str) -> None:
        """Start the queues of a phase once, for all who ask meanwhile; anew where it has failed: it may work by now."""
        start = self._starting.get(phase)
        if start is None or (start.done() and (start.cancelled() or start.exception() is not None)):
            start = self._starting[phase] = asyncio.create_task(self._start(phase))
        await asyncio.shield(start)

    async def _start(self, phase: str) -> None:
        starts = [queue.start() for queue in self._queues[phase].values()]
        for error in filter(None, await asyncio.gather(*starts, return_exceptions=True)):
            raise error

    async def _score(
        self, sample: dict[str, Any], phase: str, name: str, *, stands_in: bool = False
    ) -> AdapterResult:
        """What the adapter says, or where it has failed the one that stands in for it."""
        score = self._queues[phase][name].score
        asked = score(sample) if self._middleware is None else self._middleware(name, sample, phase, score)
        with waiting("reward", f"prompt {sample.get('group_id')}", name):
            result = await asked
        if stands_in or name not in self._fallbacks or not result.status.is_lost:
            return result
        answer = await self._score(sample, phase, self._fallbacks[name], stands_in=True)
        # Under the name of the adapter it stands in for, or weights and constants would not find it
        return answer.standing_in_for(result)


def _worker_counts(adapters: Sequence[str], workers: Mapping[str, int] | int) -> dict[str, int]:
    by_name = dict.fromkeys(adapters, workers) if isinstance(workers, int) else workers
    if unknown := ", ".join(sorted(set(by_name) - set(adapters))):
        raise ConfigurationError(f"workers asked for {unknown}, but the adapters are {list(adapters)}")
    counts = {name: by_name.get(name, 1) for name in adapters}
    if min(counts.values()) < 1:
        raise ConfigurationError(f"every adapter needs at least one worker, not {counts}")
    return counts
