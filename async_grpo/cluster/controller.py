"""`RunController`: the only control process of a run. It owns the worker registries, the verifiers and the batcher.

The callers of each method:
    worker dispatchers   settings, register, until_gone, drain, deregister, expect, record_refusal, closed
    the weight sync      begin_sync, end_sync, fail
    rank 0               missing_parts, start_batcher, start, situation, evaluate, request_save, save_experience,
                         stop, close
    every rank           settings, next_message

Samples leave this process only to engines, logprob workers, reward workers and ranks. Everything else happens by method
calls within the process. The class uses plain asyncio without Ray; `trainer_rank` makes it an actor on the node of rank
0. If this process dies, the run ends.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.algorithm.teacher_config import worker_flags
from async_grpo.cluster.engine_sleep import EngineSleep
from async_grpo.cluster.registered_workers import GenerationWorkers, LogprobWorkers, RegisteredWorkers
from async_grpo.cluster.teacher_servers import TeacherServers
from async_grpo.environments.played import Played
from async_grpo.errors import ConfigurationError
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig, EvaluationConfig, RunFacts
from async_grpo.experience.dataset import Question
from async_grpo.experience.restored_images import with_images
from async_grpo.experience.run_images import RunImages
from async_grpo.experience.state import ExperienceState
from async_grpo.experience.worker_registry import scheduling_policy
from async_grpo.messages import Message, SharedRunSettings, WorkerInfo
from async_grpo.options.log_setup import log_to_own_file
from async_grpo.processes.loop_watch import LoopWatch
from async_grpo.processes.waits import situation
from async_grpo.protocols import Connect, Generation, Logprobs, Verification, WeightPackage
from async_grpo.types import GENERATION, REFERENCE, Prompt
from async_grpo.weights.package import SELF_TEST


@dataclass(frozen=True)
class MissingParts:
    """The kinds of workers that a run waits for before it can start, and `--reward-fns` of those that have joined."""

    description: str  # missing workers and the commands that start them; "" if none is missing
    # `--reward-fns` of the generation workers, which the run uses if the trainer names none; "" if they name none
    rewards: str


class RunController:
    """Controls a run and holds its state. All public methods may be called from other processes.

    Args:
        settings: Settings that all workers of the run must agree on.
        worker_grace_s: Seconds that work waits for a worker while none of its kind is registered.
        connect: Makes the link to a worker from the worker's handle.
        scheduling: Value of `--scheduling`, the policy that distributes work among workers.
    """

    def __init__(
        self, settings: SharedRunSettings, worker_grace_s: float, connect: Connect, scheduling: str
    ) -> None:
        log_to_own_file("controller")
        self._settings = settings
        policy = scheduling_policy(scheduling)
        self._generation = GenerationWorkers(settings.seed, worker_grace_s, connect, policy)
        # Without training, the workers keep the weights that they start with, so they get work without a weight sync
        self._generation.is_frozen = not settings.trains
        self._sleep = EngineSleep(settings.sleep_level, self._generation) if settings.sleep_level else None
        self._logprobs = {
            role: LogprobWorkers(role, worker_grace_s, connect, policy) for role in settings.logprob_roles
        }
        if settings.moves_reference:
            self._logprobs[REFERENCE].is_frozen = False
        self._workers_by_kind = {GENERATION: self._generation, **self._logprobs}
        self._refusals: list[str] = []
        self._batcher: ExperienceBatcher | None = None
        self._loop_watch = LoopWatch()
        self._resources = AsyncExitStack()  # verifiers, environment and batcher, which `stop` closes
        self._is_over = asyncio.Event()
        self._end_reason = ""
        # Whether an extra sync for late workers was requested and has not begun. Workers are late if they join during
        # the run
        self._is_late_sync_requested = False

    async def settings(self) -> SharedRunSettings:
        """Return the settings that all workers of the run must agree on."""
        return self._settings

    async def register(self, info: WorkerInfo, handle: Any) -> None:
        """Register a worker. If it joins during the run, it gets the weights in an extra sync, and only then work."""
        is_late = await self._workers_by_kind[info.kind].register(info, handle)
        if is_late and not self._is_late_sync_requested:
            self._is_late_sync_requested = True
            self.batcher.workers_joined()

    async def deregister(self, kind: str, worker_id: str, reason: str) -> None:
        """Remove a worker that has ended, or that is fenced because it could not prove its weights."""
        self._workers_by_kind[kind].deregister(worker_id, reason)

    async def drain(self, kind: str, worker_id: str, within_s: float) -> None:
        """Give no more work to a worker that is about to end.

        Work that is not finished after `within_s` seconds continues on other workers.
        """
        await self._workers_by_kind[kind].drain(worker_id, within_s)

    async def until_gone(self, kind: str, worker_id: str) -> str:
        """Wait until a worker is lost or fenced, and return the reason."""
        return await self._workers_by_kind[kind].until_gone(worker_id)

    async def expect(self, kind: str, for_s: float) -> None:
        """Let the run wait `for_s` seconds for a worker that died and is being restarted."""
        self._workers_by_kind[kind].registry.expect(for_s)

    async def record_refusal(self, reason: str) -> None:
        """Record why a worker cannot work for this run. Rank 0 then ends the run with this reason."""
        self._refusals.append(reason)

    async def situation(self) -> dict[str, Any]:
        """Return the id of this process and its open waits, to explain a stall."""
        return situation()

    async def closed(self) -> str:
        """Wait for the end of the run, and return its reason."""
        await self._is_over.wait()
        return self._end_reason

    async def begin_sync(
        self, for_late: bool = False, of_reference: bool = False
    ) -> list[tuple[WorkerInfo, Any]]:
        """Begin a weight sync. Until it ends, no worker joins.

        Args:
            for_late: Whether the sync is only for late workers: those that joined during the run and wait for their
                first weights.
            of_reference: True sends the weights of a moving reference to the reference workers. False sends the
                policy's weights to the workers that compute with the policy.

        Returns:
            The workers that get the weights, with their handles.
        """
        if for_late:
            self._is_late_sync_requested = False
        members = []
        for workers in self._receivers(of_reference):
            members += workers.begin_sync(for_late)
        return members

    def _receivers(self, of_reference: bool) -> list[RegisteredWorkers]:
        """Return the registries of the workers that get the reference's weights (True) or the policy's weights (False).

        The policy's registries include those of teachers, whose weights never change: their `begin_sync` returns no worker.
        """
        receivers: list[RegisteredWorkers] = []
        for kind, workers in self._workers_by_kind.items():
            if (kind == REFERENCE) == of_reference:
                receivers.append(workers)
        return receivers

    async def end_sync(
        self, package: WeightPackage, landed: Sequence[str], of_reference: bool = False
    ) -> None:
        """End a weight sync.

        If the sync sent a new policy, the workers generate with it from now on, and new groups may be admitted.

        Args:
            package: The weights that were sent.
            landed: Ids of the workers that have proven that they use these weights.
            of_reference: Whether the weights are those of a moving reference.
        """
        for workers in self._receivers(of_reference):
            workers.end_sync(package, landed)
        if of_reference:
            return
        if self._sleep is not None:
            await self._sleep.after_sync(package)
        is_new_policy = package.version != SELF_TEST and not package.for_late
        if self._batcher is not None and is_new_policy:
            await self._batcher.weights_live(package.version)

    async def fail(self, error: BaseException) -> None:
        """End the run because a weight sync failed. The ranks get the error instead of their next message."""
        if self._batcher is not None:
            self._batcher.fail(error)

    async def missing_parts(self) -> MissingParts:
        """Return the kinds of workers that the run still needs, and `--reward-fns` of its generation workers.

        Raises:
            ConfigurationError: A worker refused the run, or two generation workers name different rewards.
        """
        if self._refusals:
            raise ConfigurationError("; ".join(self._refusals))
        missing = []
        for kind, workers in self._workers_by_kind.items():
            if not workers.registry.members():
                mode = kind if kind == GENERATION else " ".join(["logprob", *worker_flags(kind)])
                missing.append(f"no {kind} worker (python worker_dispatcher.py --mode {mode} ...)")
        named_rewards = {info.rewards for info in self._generation.registry.members() if info.rewards}
        if len(named_rewards) > 1:
            names = " / ".join(sorted(named_rewards))
            raise ConfigurationError(f"generation workers name different rewards: {names}")
        return MissingParts("; and ".join(missing), next(iter(named_rewards), ""))

    async def start_batcher(
        self,
        config: BatchConfig,
        facts: RunFacts,
        num_ranks: int,
        questions: Sequence[Question],
        make_verification: Callable[[], Verification],
        checkpoint: Path | None = None,
        make_played: Callable[..., Played] | None = None,
        make_servers: Callable[[], TeacherServers] | None = None,
        images_folder: Path | None = None,
    ) -> None:
        """Start the verifiers and the environment, and create the batcher.

        Args:
            config: The run's options for batches, steps and rewards.
            facts: Facts about the run's rewards and model.
            num_ranks: Number of trainer ranks.
            questions: The data set.
            make_verification: Creates the verifiers in this process.
            checkpoint: Folder of the saved experience from which a resumed run continues; None for a new run.
            make_played: Connects the engines to the run's environment; None if the run has no environment.
            make_servers: Connects to the teachers on servers; None if the run has none.
            images_folder: Folder of the run's images; None if the model reads none.
        """
        verification = make_verification()
        self._resources.push_async_callback(verification.close)
        await verification.start()
        generation: Generation = self._generation
        images = RunImages(questions, facts.kept_images, keeps_all=facts.keeps_images)
        if make_played is not None:
            played = make_played(generation, run_images=images)
            self._resources.push_async_callback(played.close)
            await played.start()
            generation = played
        self._batcher = ExperienceBatcher(
            config,
            questions,
            generation,
            verification,
            self._logprobs.get(REFERENCE),
            self._logprobs.get("proximal"),
            teachers=await self._teachers(config, make_servers),
            num_ranks=num_ranks,
            facts=facts,
            more_stats=self._loop_stats,
            before_step=None if self._sleep is None else self._sleep.begin,
            images=images,
        )
        if checkpoint is not None:
            state = await asyncio.to_thread(
                _saved_state, checkpoint, self._batcher.cursor.prompt, images_folder
            )
            self._batcher.restore(state)
        self._resources.push_async_callback(self._batcher.close)

    async def _teachers(
        self, config: BatchConfig, make_servers: Callable[[], TeacherServers] | None
    ) -> dict[str, Logprobs]:
        """Return the source of each teacher's log-probs, by name: logprob workers, or servers."""
        teachers: dict[str, Logprobs] = {}
        for name, kind in config.teacher_kinds.items():
            teachers[name] = self._logprobs[kind]
        if make_servers is not None:
            servers = make_servers()
            self._resources.push_async_callback(servers.close)
            teachers |= await servers.start()
        return teachers

    async def start(self) -> None:
        """Start generating completions. The engines must already have the weights of the policy that is trained next."""
        # Exclude the objects of torch and transformers from garbage collection, which makes a full collection 0.4 s
        # shorter
        gc.freeze()
        self._loop_watch.start()
        self._resources.callback(self._loop_watch.stop)
        await self.batcher.start()

    def _loop_stats(self) -> dict[str, float]:
        return {"controller_longest_turn_s": self._loop_watch.take_longest_s()}

    async def next_message(self, rank: int) -> Message:
        """Wait for the next message of a rank; see `ExperienceBatcher.next_message`."""
        return await self.batcher.next_message(rank)

    async def evaluate(
        self, questions: Mapping[str, Sequence[Question]], config: EvaluationConfig
    ) -> dict[str, dict[str, Any]]:
        """Evaluate the questions of the files, one file after the other, and return the results by file name."""
        results = {}
        for file_name, file_questions in questions.items():
            results[file_name] = await self.batcher.evaluate(file_questions, config)
        return results

    async def request_save(self, end_reason: str) -> None:
        """Make every rank save a checkpoint. If `end_reason` is not empty, the run ends after the checkpoint."""
        self.batcher.request_save(end_reason)

    async def save_experience(self, folder: Path, step: int) -> None:
        """Write the state from which a run resumes at `step`."""
        # Take the state before the first `await`, so that it is the state at the time of the call
        state = self.batcher.state(step)
        await asyncio.to_thread(state.save, folder)

    async def stop(self) -> None:
        """Cancel all rollouts, and close the environment and the rewards.

        Wait until no call of a judge runs any more, so that the record of the judges' costs is complete.
        """
        await self._resources.aclose()

    async def close(self, reason: str) -> None:
        """Tell the dispatchers that the run is over, and wait until all workers are deregistered."""
        self._end_reason = self._end_reason or reason
        self._is_over.set()
        while any(workers.by_id for workers in self._workers_by_kind.values()):
            await asyncio.sleep(0.1)

    @property
    def batcher(self) -> ExperienceBatcher:
        """The batcher, which `start_batcher` creates."""
        assert self._batcher is not None, "start_batcher comes first"
        return self._batcher


def _saved_state(
    checkpoint: Path, prompt: Callable[[int, int], Prompt], images_folder: Path | None
) -> ExperienceState:
    """Return the state of a checkpoint, and bring the images of its finished groups into this run's folder of images.

    A finished group whose images are missing becomes unfinished, so it is generated again.
    """
    state = ExperienceState.load(checkpoint, prompt, images_folder)
    if images_folder is None:
        return state
    earlier_run = checkpoint.parent.parent  # folder of the run that wrote the checkpoint
    return with_images(state, earlier_run, images_folder)
