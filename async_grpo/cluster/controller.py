"""`RunController`: the one control process of a run. It holds the registries, the verifiers and the batcher.

    dispatchers   settings, register, until_gone, drain, deregister, expect, refuse, closed
    the sync      begin_sync, end_sync, fail
    rank 0        lacks, start_batcher, start, situation, evaluate, request_save, save_experience, stop, close
    every rank    settings, next_message

A sample leaves this process for an engine, for a reward worker and for a rank; all else is a method call. Plain asyncio
without Ray: `trainer_rank` makes an actor of it on rank 0's node. Its death ends the run.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from async_grpo.cluster.registered_workers import GenerationWorkers, LogprobWorkers
from async_grpo.environments.played import Played
from async_grpo.errors import ConfigurationError
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig, EvaluationConfig, RunFacts
from async_grpo.experience.dataset import Question
from async_grpo.experience.state import ExperienceState
from async_grpo.experience.worker_registry import scheduling_policy
from async_grpo.messages import Message, SharedRunSettings, WorkerInfo
from async_grpo.options.command_line import log_to_own_file
from async_grpo.processes.loop_watch import LoopWatch
from async_grpo.processes.waits import situation
from async_grpo.protocols import Connect, Generation, Verification, WeightPackage
from async_grpo.types import GENERATION
from async_grpo.weights.package import SELF_TEST


class RunController:
    """Every public method may be called from another process.

    settings: what every worker of the run must share. worker_grace_s: how long work waits while no worker of a kind is
    registered. connect: makes a link to a worker of its handle. scheduling: names the policy that gives work to workers.
    """

    def __init__(
        self, settings: SharedRunSettings, worker_grace_s: float, connect: Connect, scheduling: str
    ) -> None:
        log_to_own_file("controller")
        self._settings, common = settings, (worker_grace_s, connect, scheduling_policy(scheduling))
        self._generation = GenerationWorkers(settings.seed, *common)
        self._generation.is_frozen = not settings.trains
        self._logprobs = {kind: LogprobWorkers(kind, *common) for kind in settings.logprob_roles}
        self._workers = {GENERATION: self._generation, **self._logprobs}
        self._refusals: list[str] = []
        self._batcher: ExperienceBatcher | None = None
        self._loop_watch = LoopWatch()
        self._open = AsyncExitStack()
        self._over = asyncio.Event()
        self._reason = ""  # why it is over
        self._late_sync_asked = False  # and not yet begun

    async def settings(self) -> SharedRunSettings:
        return self._settings

    async def register(self, info: WorkerInfo, handle: Any) -> None:
        """Let a worker in. One that comes late gets work after a sync for such as it is, between two micro-batches."""
        is_late = await self._workers[info.kind].register(info, handle)
        if is_late and not self._late_sync_asked:
            self._late_sync_asked = True
            self.batcher.workers_joined()

    async def deregister(self, kind: str, worker_id: str, reason: str) -> None:
        """A worker is gone, or fenced."""
        self._workers[kind].deregister(worker_id, reason)

    async def drain(self, kind: str, worker_id: str, within_s: float) -> None:
        """A worker is told to end: no more work for it; what it has not done `within_s` goes on elsewhere."""
        await self._workers[kind].drain(worker_id, within_s)

    async def until_gone(self, kind: str, worker_id: str) -> str:
        """Waits until that worker is lost, or fenced; returns why."""
        return await self._workers[kind].until_gone(worker_id)

    async def expect(self, kind: str, for_s: float) -> None:
        """A worker that died is started again: until then, the run waits for it."""
        self._workers[kind].registry.expect(for_s)

    async def refuse(self, reason: str) -> None:
        """A worker found that it cannot work for this run."""
        self._refusals.append(reason)

    async def situation(self) -> dict[str, Any]:
        return situation()

    async def closed(self) -> str:
        """Waits for the end of the run; returns its reason."""
        await self._over.wait()
        return self._reason

    async def begin_sync(self, for_late: bool = False) -> list[tuple[WorkerInfo, Any]]:
        """Weights are about to be sent: no worker joins meanwhile. Returns those to send them to, with handles."""
        self._late_sync_asked &= not for_late
        return [member for workers in self._workers.values() for member in workers.begin_sync(for_late)]

    async def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """`landed` have proven `package`. If these are a policy's weights they generate with them: the workers may work,
        and new groups be admitted."""
        for workers in self._workers.values():
            workers.end_sync(package, landed)
        if self._batcher is not None and package.version != SELF_TEST and not package.for_late:
            await self._batcher.weights_live(package.version)

    async def fail(self, error: BaseException) -> None:
        """Weights did not land: the ranks hear of it with their next message, as the run is over."""
        if self._batcher is not None:
            self._batcher.fail(error)

    async def lacks(self) -> tuple[str, str]:
        """What the run still lacks, in words ("" when it can start), and the rewards that its workers name, or "".

        ConfigurationError: a worker refused, or they name different rewards.
        """
        if self._refusals:
            raise ConfigurationError("; ".join(self._refusals))
        members = {kind: workers.registry.members() for kind, workers in self._workers.items()}
        named = sorted({info.rewards for info in members[GENERATION]} - {""})
        if len(named) > 1:
            raise ConfigurationError(f"generation workers name different rewards: {' / '.join(named)}")
        missing = []
        for kind in (kind for kind, infos in members.items() if not infos):
            mode = kind if kind == GENERATION else f"logprob --role {kind}"
            missing.append(f"no {kind} worker (python worker_dispatcher.py --mode {mode} ...)")
        return "; and ".join(missing), "".join(named)

    async def start_batcher(
        self,
        config: BatchConfig,
        facts: RunFacts,
        num_ranks: int,
        questions: Sequence[Question],
        make_verification: Callable[[], Verification],
        checkpoint: Path | None = None,
        make_played: Callable[[Generation], Played] | None = None,
    ) -> None:
        """Start the verifiers and the environment, and make the batcher, of what a checkpoint says if one is given."""
        verification = make_verification()
        self._open.push_async_callback(verification.close)
        await verification.start()
        reference, proximal = (self._logprobs.get(kind) for kind in ("reference", "proximal"))
        generation: Generation = self._generation
        if make_played is not None:
            generation = played = make_played(generation)
            self._open.push_async_callback(played.close)
            await played.start()
        sources = generation, verification, reference, proximal
        self._batcher = ExperienceBatcher(
            config, questions, *sources, num_ranks=num_ranks, facts=facts, more_stats=self._loop_stats
        )
        if checkpoint is not None:
            state = await asyncio.to_thread(ExperienceState.load, checkpoint, self._batcher.cursor.prompt)
            self._batcher.restore(state)
        self._open.push_async_callback(self._batcher.close)

    async def start(self) -> None:
        """Begin to generate. The engines must hold policy version 0."""
        gc.freeze()  # or every full collection looks through torch and transformers again, for some 0.4 s
        self._loop_watch.start()
        self._open.callback(self._loop_watch.stop)
        await self.batcher.start()

    def _loop_stats(self) -> dict[str, float]:
        return {"controller_longest_turn_s": self._loop_watch.take_longest_s()}

    async def next_message(self, rank: int) -> Message:
        return await self.batcher.next_message(rank)

    async def evaluate(
        self, questions: Mapping[str, Sequence[Question]], config: EvaluationConfig
    ) -> dict[str, dict[str, Any]]:
        """By the names of the files, one after the other."""
        return {name: await self.batcher.evaluate(of_file, config) for name, of_file in questions.items()}

    async def request_save(self, end_reason: str) -> None:
        self.batcher.request_save(end_reason)

    async def save_experience(self, folder: Path, step: int) -> None:
        """Write what a run that resumes at `step` goes on with; taken before any other call is served."""
        state = self.batcher.state(step)
        await asyncio.to_thread(state.save, folder)

    async def stop(self) -> None:
        """End the rollouts for steps that will not be trained; rewards are closed, and what they cost is on disk."""
        await self._open.aclose()

    async def close(self, reason: str) -> None:
        """The run is over: tell the dispatchers, and wait until their workers have signed off."""
        self._reason = self._reason or reason
        self._over.set()
        while any(workers.by_id for workers in self._workers.values()):
            await asyncio.sleep(0.1)

    @property
    def batcher(self) -> ExperienceBatcher:
        assert self._batcher is not None, "start_batcher comes first"
        return self._batcher
