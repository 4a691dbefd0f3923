"""The registered workers of each kind: they join, get weights, and then get work.

This module uses plain asyncio without Ray. A worker joins with a handle, from which `connect` makes a callable link.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.cluster.unfinished_completions import UnfinishedCompletions
from async_grpo.errors import PromptSetAside, WorkerLost
from async_grpo.experience.worker_registry import Lease, SchedulingPolicy, WorkerRegistry
from async_grpo.inference.logprob_config import FROZEN_ROLES
from async_grpo.messages import WorkerInfo
from async_grpo.metrics.spans import MOST, Span, condensed
from async_grpo.processes.waits import waiting
from async_grpo.protocols import Connect, WeightPackage, WorkerLink
from async_grpo.types import GENERATION, Completion, ImageReference, Prompt, Sampling, Session
from async_grpo.weights.package import SELF_TEST

# Seconds to wait for the workers' statistics at the end of a step. It is short because all ranks wait meanwhile
PROGRESS_TIMEOUT_S = 1.0
# Number of worker losses in a row, without any new token in between, after which the prompt itself is probably the
# cause. Losses after new tokens do not count: long completions have many of these, and their prompts would be set aside
# too often
ATTEMPTS_WITHOUT_PROGRESS = 4
MAX_ATTEMPTS = 16  # maximum number of attempts to generate one group, with or without new tokens
INITIAL_MEAN_LENGTH_TOKENS = 64.0
MEAN_LENGTH_UPDATE = 0.01  # weight of a new completion in the moving average


@dataclass
class _Worker:
    """A worker that has joined."""

    info: WorkerInfo
    handle: Any
    link: WorkerLink
    # Whether the worker joined during the run and has not yet proven that it uses the current weights. Such a worker
    # gets the weights in an extra sync
    is_late: bool
    gone: asyncio.Future[str]  # resolves to the reason when the worker is removed
    # The worker's last reply to `progress`, until `take_stats` has counted it
    progress: asyncio.Future[dict[str, Any]] | None = None


class RegisteredWorkers:
    """The workers of one kind.

    Args:
        kind: "generation", "reference", "proximal", "self_teacher", "teacher" or "teacher:NAME".
        grace_s: Seconds that work waits for a worker while none is registered.
        connect: Makes the link to a worker from the worker's handle.
        policy: Chooses the worker that gets the next work.
    """

    def __init__(self, kind: str, grace_s: float, connect: Connect, policy: SchedulingPolicy) -> None:
        self.kind = kind
        self._connect = connect
        # Whether workers of this kind keep the weights with which they start. A moving reference sets this to False
        self.is_frozen = kind.partition(":")[0] in FROZEN_ROLES
        self.registry = WorkerRegistry(kind, grace_s, policy)
        self.by_id: dict[str, _Worker] = {}
        # Whether a first sync has succeeded. A worker that joins later is "late": it gets the weights in an extra sync
        self._has_weights = False
        self._sync_began_at = 0.0  # Unix time at which the current sync began; 0 if there is none
        self._syncs: deque[Span] = deque(maxlen=MOST)
        self._last_lost: WorkerLost | None = None
        # Messages about workers that were lost since the last `take_lost`
        self._loss_messages: list[str] = []
        self._no_sync = asyncio.Event()  # cleared during a weight sync
        self._no_sync.set()

    async def register(self, info: WorkerInfo, handle: Any) -> bool:
        """Register a worker. If a sync is running, wait for its end first.

        Returns:
            Whether the worker is late, so that it needs an extra sync before it gets work. If False, the worker gets
            its weights in the next regular sync.
        """
        await self._no_sync.wait()
        worker_id = info.worker_id
        is_late = self._has_weights
        # First remove the registration of the same id, if there is one. Otherwise, the loss of the old link would later
        # remove the new worker
        self.deregister(worker_id, "it registered again")
        self.registry.register(info)
        self.by_id[worker_id] = _Worker(
            info,
            handle,
            link=self._connect(
                handle,
                f"{self.kind} worker {worker_id}",
                lambda error: self.deregister(worker_id, str(error)),
            ),
            is_late=is_late,
            gone=asyncio.get_running_loop().create_future(),
        )
        if self.is_frozen:
            self.registry.activate(worker_id)
        return is_late

    def deregister(self, worker_id: str, reason: str) -> None:
        """Remove a worker that has ended or is fenced. Unknown ids are ignored: a loss may be reported twice."""
        self.registry.deregister(worker_id, reason)
        worker = self.by_id.pop(worker_id, None)
        if worker is None:
            return
        worker.link.close()
        if worker.progress is not None:
            worker.progress.add_done_callback(_ignore_error)
        worker.gone.set_result(reason)
        self._loss_messages.append(f"{self.kind} worker {worker_id} was lost: {reason}")

    async def drain(self, worker_id: str, within_s: float) -> None:
        """Give no more work to a worker. Remove it when it has finished its work or after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        self.registry.retire(worker_id)
        while self.registry.outstanding(worker_id) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        num_unfinished = self.registry.outstanding(worker_id)
        self.deregister(worker_id, f"it was told to end, {num_unfinished} sequences go on elsewhere")

    def take_lost(self) -> list[str]:
        """Return a message for each worker that was lost since the last call."""
        messages = self._loss_messages
        self._loss_messages = []
        return messages

    async def until_gone(self, worker_id: str) -> str:
        """Wait until a worker is removed, and return the reason."""
        worker = self.by_id.get(worker_id)
        return await asyncio.shield(worker.gone) if worker else "it is no member"

    def begin_sync(self, for_late: bool = False) -> list[tuple[WorkerInfo, Any]]:
        """Begin a weight sync, during which no worker joins.

        Args:
            for_late: If True, the sync is only for late workers; if False, it is for all other workers.

        Returns:
            The workers that get the weights, with their handles.
        """
        if self.is_frozen:
            return []
        self._no_sync.clear()
        # If a self-test came before, it was the first part of this sync, so keep the time at which it began
        self._sync_began_at = self._sync_began_at or time.time()
        return [(worker.info, worker.handle) for worker in self.by_id.values() if worker.is_late == for_late]

    def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """End a weight sync, and give work to the workers whose weights are proven.

        After a self-test (a package of a negative version) the sync continues, because the self-test is only its first
        part.

        Args:
            package: The weights that were sent.
            landed: Ids of the workers that have proven that they use these weights.
        """
        if package.version == SELF_TEST or self.is_frozen:
            return
        self._has_weights = True
        self._syncs.append(("weights", "sync", self._sync_began_at, time.time()))
        self._sync_began_at = 0.0
        for worker_id in set(landed) & set(self.by_id):
            self.by_id[worker_id].is_late = False
            self.registry.activate(worker_id)
        self._no_sync.set()

    @asynccontextmanager
    async def lease(
        self, work: str, count: int, tokens_each: int, prefers: str = ""
    ) -> AsyncIterator[tuple[WorkerLink, Lease]]:
        """Wait for a worker with room for `count` sequences, and reserve that room during the `with` block.

        If the block raises `WorkerLost`, the error is suppressed and the worker is removed.

        Args:
            work: Name of the work, for reports about what the run waits for.
            count: Number of sequences, all of which go to the same worker.
            tokens_each: Expected number of tokens of each sequence.
            prefers: Id of the worker whose prefix cache contains the beginning of the sequences, if any.
        """
        with waiting("place", work, f"a place in a {self.kind} worker"):
            lease = await self.registry.acquire(count, tokens_each, prefers)
        worker = self.by_id[lease.worker_id]
        try:
            with waiting("worker", work, f"{self.kind} worker {lease.worker_id}"):
                yield worker.link, lease
        except WorkerLost as error:
            self._last_lost = error
            # Remove the worker that failed, but not a new worker that has registered under the same id in the meantime
            if self.by_id.get(lease.worker_id) is worker:
                self.deregister(lease.worker_id, str(error))
        finally:
            self.registry.release(lease, lease.sequences)


def _ignore_error(task: asyncio.Future[Any]) -> None:
    """Read the error of a task for which nothing waits any more, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


class GenerationWorkers(RegisteredWorkers):
    """`Generation` that distributes groups among the registered workers.

    Args:
        seed: The run's seed, from which the seeds of all completions follow.
        common: Arguments of `RegisteredWorkers` after `kind`.
    """

    def __init__(self, seed: int, *common: Any) -> None:
        super().__init__(GENERATION, *common)
        self._seed = seed
        # Moving average of the completion length in tokens. It estimates the work of a new request, to balance the
        # workers
        self._mean_length = INITIAL_MEAN_LENGTH_TOKENS

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions as they finish. If a worker is lost, another one continues its completions.

        Args:
            prompt: The prompt.
            count: Number of completions.
            sampling: Overrides of the run's sampling settings.
            session: The trajectory to which the completion adds a turn; None if there is no environment.

        Raises:
            PromptSetAside: Too many workers were lost while they processed this prompt.
        """
        members = [session.member] if session else list(range(count))
        session = session or Session(0)
        # If a worker is lost, another worker continues with the same seeds. New seeds would favor short completions,
        # because long ones are lost more often
        seeds = {}
        for member in members:
            seeds[member] = request_seed(self._seed, prompt.ordinal, member, session.turn)
        session.turn += 1
        unfinished = UnfinishedCompletions(seeds)
        num_futile_attempts = 0
        for _ in range(MAX_ATTEMPTS):
            progress_before = unfinished.progress
            async with self.lease(
                f"prompt {prompt.ordinal}",
                count=len(unfinished.seeds),
                tokens_each=len(prompt.token_ids) + unfinished.most_tokens + int(self._mean_length),
                prefers=session.worker_id,
            ) as (link, lease):
                session.worker_id = lease.worker_id
                arguments = [prompt.token_ids, dict(unfinished.seeds), sampling]
                if unfinished.begun is not None or prompt.images:
                    arguments.append(unfinished.begun)
                if prompt.images:
                    arguments.append(prompt.images)
                reports = link.stream("complete", *arguments)
                async with aclosing(reports):
                    async for report in reports:
                        if not isinstance(report, Completion):
                            unfinished.add_tokens(report)
                            continue
                        unfinished.finish(report)
                        # Release the place of this sequence at once, so that the worker can get other work
                        self.registry.release(lease)
                        self._mean_length += MEAN_LENGTH_UPDATE * (len(report) - self._mean_length)
                        yield report
            if not unfinished.seeds:
                return
            has_progressed = unfinished.progress != progress_before
            num_futile_attempts = 0 if has_progressed else num_futile_attempts + 1
            if num_futile_attempts == ATTEMPTS_WITHOUT_PROGRESS:
                break
        raise PromptSetAside(f"several workers were lost over prompt {prompt.ordinal}: {self._last_lost}")

    async def take_stats(self) -> dict[str, Any]:
        """Return the engines' statistics since the last call; see `Generation`.

        The statistics of an engine that does not answer in time are counted in a later step.
        """
        progress_by_worker = await self._take_progress()
        spans = list(self._syncs)
        self._syncs.clear()
        token_timeline = []
        busy = []
        memory = {}
        for worker_id, progress in progress_by_worker.items():
            # An engine that runs in this process, as in tests, does not report its memory
            if "memory" in progress:
                memory[worker_id] = progress["memory"]
            token_timeline += progress["token_timeline"]
            busy += progress["busy"]
            for begin, end in progress["busy"]:
                spans.append((f"engine {worker_id}", "generate", begin, end))
        return {
            "token_timeline": sorted(token_timeline),
            "wait_generation_weights_s": sum(
                progress["paused_s"] for progress in progress_by_worker.values()
            ),
            "busy": busy,
            "spans": condensed(spans),
            "memory": memory,
            "workers_lost": self.take_lost(),
        }

    async def _take_progress(self) -> dict[str, dict[str, Any]]:
        """Return the answers to `Engine.progress` that arrive in time, by worker id."""
        worker_by_task = {}
        for worker in self.by_id.values():
            if worker.progress is None:
                worker.progress = asyncio.ensure_future(worker.link.call("progress"))
            worker_by_task[worker.progress] = worker
        if not worker_by_task:
            return {}
        finished_tasks, _ = await asyncio.wait(worker_by_task, timeout=PROGRESS_TIMEOUT_S)
        progress_by_worker = {}
        for task in finished_tasks:
            worker = worker_by_task[task]
            # A concurrent call, at the end of another step, may have waited for the same answer. Only the first of them
            # counts it
            if worker.progress is task:
                worker.progress = None
                if not isinstance(task.exception(), WorkerLost):
                    progress_by_worker[worker.info.worker_id] = task.result()
        return progress_by_worker


def request_seed(seed: int, ordinal: int, member: int, turn: int = 0) -> int:
    """Return the seed (63 bits) of one completion.

    Args:
        seed: The run's seed.
        ordinal: Number of the prompt since the start of the run.
        member: Index of the completion in its group.
        turn: Number of the turn, if the completion is a turn of a trajectory.

    >>> request_seed(37, 5, 0) == request_seed(37, 5, 0) != request_seed(37, 5, 1)
    True
    """
    text = f"{seed}/{ordinal}/{member}"
    if turn:
        text += f"/{turn}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class LogprobWorkers(RegisteredWorkers):
    """`Logprobs` that are computed by the registered workers."""

    async def logprobs(
        self,
        sequences: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        allowed: Sequence[AllowedTokens | None] | None = None,
        images: Sequence[tuple[ImageReference, ...]] | None = None,
    ) -> list[np.ndarray]:
        """Return log-probs from the worker that the scheduling policy chooses; see `Logprobs`.

        Raises:
            WorkerLost: All workers that were tried were lost.
        """
        arguments: list[Any] = [list(sequences), list(prompt_lengths)]
        if allowed is not None or images is not None:
            arguments.append(None if allowed is None else list(allowed))
        if images is not None:
            arguments.append(list(images))
        return await self._call("logprobs", arguments)

    async def logprobs_with_top(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int], k: int
    ) -> list[np.ndarray]:
        """Return ids and log-probs of the sampled tokens and of the k most probable ones; see `LogprobWorker`.

        Raises:
            WorkerLost: All workers that were tried were lost.
        """
        return await self._call("logprobs_with_top", [list(sequences), list(prompt_lengths), k])

    async def _call(self, method: str, arguments: list[Any]) -> list[np.ndarray]:
        """Call a method of one worker, whose first argument is a list of sequences."""
        sequences = arguments[0]
        num_tokens = sum(len(sequence) for sequence in sequences)
        tokens_each = max(1, num_tokens // len(sequences))
        for _ in range(ATTEMPTS_WITHOUT_PROGRESS):
            # If the worker is lost, `lease` suppresses the error, and another worker is tried
            async with self.lease("a group", len(sequences), tokens_each) as (link, _):
                return await link.call(method, *arguments)
        raise WorkerLost(
            f"{ATTEMPTS_WITHOUT_PROGRESS} {self.kind} workers were lost over one group: {self._last_lost}"
        )
