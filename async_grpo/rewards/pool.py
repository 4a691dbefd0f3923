"""`VerifierPool`: scores samples with several adapters, each of which has its own queue and workers."""

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

# The phases of a run
TRAINING = "train"
EVALUATION = "eval"

Score = Callable[[dict[str, Any]], Awaitable[AdapterResult]]
Middleware = Callable[[str, dict[str, Any], str, Score], Awaitable[AdapterResult]]


class VerifierPool:
    """Scores samples with several adapters. A pool is plain asyncio code: use it from one event loop only.

    Training and evaluation have separate queues and workers, so that neither waits for the other. The workers for
    evaluation are made when the first evaluation sample arrives.

    Args:
        adapters: Names of the adapters, as `make_worker` understands them.
        make_worker: Makes and starts a worker of one adapter, here or on another machine.
        workers: Number of workers per adapter: one number for all adapters, or numbers by name. The default is 1.
        evaluation_workers: Number of workers per adapter for evaluation.
        make_evaluator: Makes the workers for evaluation. The default is `make_worker`.
        combination: Rule that combines the results of a sample into its verdict. The default takes the best reward.
        fallbacks: Maps the name of an adapter to the name of its fallback adapter. The fallback scores the samples on
            which the adapter failed or timed out.
        middleware: Wraps every call of an adapter, for a cache or a budget. It receives the adapter's name, the sample,
            the phase ("train" or "eval") and the function that makes the call.
        timeout_s: Maximum time for a worker to score one sample, in seconds. The time in the queue does not count.
        more_timeouts: Other fields of `verifier_worker.Timeouts`.

    Raises:
        ConfigurationError: There is no adapter, an adapter is named twice, or a number of workers is impossible.
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
        self._fallbacks = dict(fallbacks or {})
        self._middleware = middleware
        unknown = ", ".join(sorted(set(self._fallbacks) - set(adapters)))
        if unknown:
            raise ConfigurationError(f"a fallback is given for {unknown}, which is not an adapter of the run")
        self._combination = combination or Combination(tuple(adapters))

        adapters_and_fallbacks = tuple(dict.fromkeys([*adapters, *self._fallbacks.values()]))
        timeouts = Timeouts(timeout_s, **more_timeouts)

        def make_queues(make: MakeWorker, num_workers: Mapping[str, int] | int) -> dict[str, AdapterQueue]:
            counts = _worker_counts(adapters_and_fallbacks, num_workers)
            return {name: AdapterQueue(name, make, count, timeouts) for name, count in counts.items()}

        self._queues = {
            TRAINING: make_queues(make_worker, workers),
            EVALUATION: make_queues(make_evaluator or make_worker, evaluation_workers),
        }
        self._start_tasks: dict[str, asyncio.Task[None]] = {}  # by phase, the task that starts its queues

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
        """Make a pool that uses only this machine, without a trainer, a run or Ray.

        Args:
            adapters: Rewards and judges of the registry file, or FILE.py:NAME.
            registry: The registry file. The default is `reward_registry.py` in the working folder if it exists, and the
                shipped registry file otherwise.
            reward_options: Keyword arguments. Each is passed to every reward that has a parameter of this name.
            reward_env: Names of environment variables to pass to the rewards' processes.
            judge_addresses: Addresses of the judges whose registry entry has no `url`.
            settings: Other arguments of this class.

        Raises:
            ConfigurationError: A file, a reward's name, an option or a variable cannot be used. `start` raises the
                errors that only a worker can find.
        """
        workers = LocalWorkers(adapters, registry, reward_options, reward_env, judge_addresses)
        return cls(workers.adapters, workers.make, **settings)

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters, without the fallbacks."""
        return self._combination.adapters

    def as_trl_reward(self) -> TRLReward:
        """Return a reward function for TRL's trainers that uses this pool (see `TRLReward`)."""
        return TRLReward(self)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Make all workers for training.

        Raises:
            Exception: A worker cannot be made. The error is that of the last attempt. All other workers are closed.
        """
        try:
            await self._ensure_started(TRAINING)
        except BaseException:
            await self.close()
            raise

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """Return the combined verdict of a sample.

        If an adapter fails, the verdict says so, and no exception is raised. The caller may cancel the call.
        """
        if evaluation:
            await self._ensure_started(EVALUATION)
        phase = EVALUATION if evaluation else TRAINING
        # Inline adapters compute in this process and answer at once, so concurrent calls of them would save no time
        is_all_inline = all(queue.inline for queue in self._queues[phase].values())
        ask = partial(self._score, sample, phase)
        return await self._combination(sample, ask, in_turn=is_all_inline)

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """Apply the adapters' group hooks (`post_process_scores`) to a group's results, and return the new verdicts.

        Args:
            samples: All samples of one group.
            verdicts: The verdict of each sample.
            evaluation: Whether the group belongs to an evaluation.
        """
        if evaluation:
            # Only a worker that is started knows whether its adapter has a group hook. If another pool made the verdicts,
            # no call of `verify` has started the workers
            await self._ensure_started(EVALUATION)
        queues = self._queues[EVALUATION if evaluation else TRAINING]
        results_by_member = [{result.adapter: result for result in verdict.results} for verdict in verdicts]
        names_with_hook = [name for name in self._combination.adapters if queues[name].stats.has_hook]
        for name in names_with_hook:
            await _apply_hook(name, queues[name], samples, results_by_member)
        return [self._combination.verdict(tuple(results.values())) for results in results_by_member]

    async def close(self) -> None:
        """Cancel running calls, fail waiting samples and close all workers.

        This takes at most a few times `Timeouts.grace_s`.
        """
        queues = [*self._queues[TRAINING].values(), *self._queues[EVALUATION].values()]
        await asyncio.gather(*(queue.close() for queue in queues))

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return each adapter's counts and times since the last `take_stats`, and its current jobs and workers."""
        return {name: queue.counts() for name, queue in self._titled_queues()}

    def take_stats(self) -> dict[str, dict[str, Any]]:
        """Return `stats` and the counts of the judges' requests, and reset all counts. Call this once per step."""
        return {name: queue.take_counts() for name, queue in self._titled_queues()}

    def _titled_queues(self) -> list[tuple[str, AdapterQueue]]:
        """Return the queues with their titles. The queues for evaluation are included once an evaluation has begun."""
        titled = list(self._queues[TRAINING].items())
        if EVALUATION in self._start_tasks:
            for name, queue in self._queues[EVALUATION].items():
                titled.append((f"{name} (evaluation)", queue))
        return titled

    async def _ensure_started(self, phase: str) -> None:
        """Start the queues of a phase, once for all callers. If that has failed, the next caller tries again."""
        task = self._start_tasks.get(phase)
        if task is None or _has_failed(task):
            task = asyncio.create_task(self._start_queues(phase))
            self._start_tasks[phase] = task
        await asyncio.shield(task)

    async def _start_queues(self, phase: str) -> None:
        starts = [queue.start() for queue in self._queues[phase].values()]
        # Wait for all starts before raising the first error, so that `close` finds all workers
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if error is not None:
                raise error

    async def _score(
        self, sample: dict[str, Any], phase: str, name: str, *, is_fallback: bool = False
    ) -> AdapterResult:
        """Return the adapter's result, or the result of its fallback if the adapter failed or timed out."""
        score = self._queues[phase][name].score
        call = score(sample) if self._middleware is None else self._middleware(name, sample, phase, score)
        with waiting("reward", f"prompt {sample.get('group_id')}", name):
            result = await call
        if is_fallback or name not in self._fallbacks or not result.status.is_lost:
            return result
        fallback_result = await self._score(sample, phase, self._fallbacks[name], is_fallback=True)
        # The result gets the name of the adapter that failed, because that adapter's weight and its constant
        # (`--on-reward-failure`) are looked up by this name
        return fallback_result.standing_in_for(result)


async def _apply_hook(
    adapter: str,
    queue: AdapterQueue,
    samples: Sequence[dict[str, Any]],
    results_by_member: Sequence[dict[str, AdapterResult]],
) -> None:
    """Replace the adapter's results in a group with those that its group hook returns.

    Members without a result of this adapter are not passed to the hook.
    """
    members = [member for member, results in enumerate(results_by_member) if adapter in results]
    if not members:
        return
    results = await queue.post_process(
        [samples[member] for member in members],
        [results_by_member[member][adapter] for member in members],
    )
    for member, result in zip(members, results, strict=True):
        results_by_member[member][adapter] = result


def _has_failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _worker_counts(adapters: Sequence[str], workers: Mapping[str, int] | int) -> dict[str, int]:
    """Return the number of workers of each adapter."""
    by_name = dict.fromkeys(adapters, workers) if isinstance(workers, int) else workers
    unknown = ", ".join(sorted(set(by_name) - set(adapters)))
    if unknown:
        raise ConfigurationError(f"workers are named for {unknown}, but the adapters are {list(adapters)}")
    counts = {name: by_name.get(name, 1) for name in adapters}
    if min(counts.values()) < 1:
        raise ConfigurationError(f"every adapter needs at least one worker, not {counts}")
    return counts
