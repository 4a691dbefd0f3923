"""`EngineSleep`: engines that share the trainer's GPU sleep while the trainer computes (`--engine-sleep`).

    the samples of a step are complete  ->  engines sleep  ->  the ranks get the step's micro-batches, and update
    ->  the weight sync wakes the engines: weights first, then the KV cache  ->  proof  ->  the next step is generated

No request is lost. A request that arrives while an engine sleeps, for example from an evaluation, waits until the
engine is awake.
"""

import asyncio

from async_grpo.cluster.registered_workers import GenerationWorkers
from async_grpo.errors import WorkerLost
from async_grpo.processes.waits import waiting
from async_grpo.protocols import WeightPackage
from async_grpo.weights.package import SELF_TEST


class EngineSleep:
    """Decides when engines sleep.

    Args:
        level: vLLM's level of sleep: 1 moves the weights to main memory, 2 drops them.
        workers: The registered generation workers.
    """

    def __init__(self, level: int, workers: GenerationWorkers) -> None:
        self._level = level
        self._workers = workers
        self._is_trainer_computing = False
        self._asleep: set[str] = set()  # ids of the workers that sleep
        # Lets one call of `sleep` run at a time. A second call would wait in an engine that is about to sleep, and send
        # it to sleep again after it has woken
        self._calls_lock = asyncio.Lock()

    async def begin(self) -> None:
        """Send all engines to sleep. Each engine first finishes the requests that it has.

        Raises:
            RunFailed: An engine cannot sleep.
        """
        self._is_trainer_computing = True
        await self._let_sleep()

    async def after_sync(self, package: WeightPackage) -> None:
        """Record that a sync has woken its engines.

        If engines joined while the trainer was computing, send them back to sleep after their sync.
        """
        if package.version == SELF_TEST:
            return  # the sync of the policy's weights follows, and wakes the engines
        if not package.for_late:
            self._is_trainer_computing = False
            self._asleep.clear()
        elif self._is_trainer_computing:
            await self._let_sleep()

    async def _let_sleep(self) -> None:
        """Send all engines to sleep that are awake, except those that wait for their first weights."""
        async with self._calls_lock:
            calls = {}
            for worker_id, worker in self._workers.by_id.items():
                if not worker.is_late and worker_id not in self._asleep:
                    calls[worker_id] = worker.link.call("sleep", self._level)
            with waiting("sleep", "the trainer", ", ".join(calls)):
                outcomes = await asyncio.gather(*calls.values(), return_exceptions=True)
            for worker_id, outcome in zip(calls, outcomes, strict=True):
                if isinstance(outcome, WorkerLost):
                    continue  # the registry notices and reports the loss of this worker
                if isinstance(outcome, BaseException):
                    raise outcome
                self._asleep.add(worker_id)
