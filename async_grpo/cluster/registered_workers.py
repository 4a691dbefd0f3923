"""The workers of each kind: which have joined, which hold the weights that they need, and the work that they get.

Plain asyncio without Ray: a worker joins with a handle, from which `connect` makes a link that can be called.
"""

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.errors import PromptSetAside, WorkerLost
from async_grpo.experience.worker_registry import Lease, SchedulingPolicy, WorkerRegistry
from async_grpo.messages import WorkerInfo
from async_grpo.metrics.spans import MOST, Span, condensed
from async_grpo.processes.waits import waiting
from async_grpo.protocols import Connect, WeightPackage, WorkerLink
from async_grpo.types import GENERATION, Completion, Prompt, Sampling, Session, Tokens
from async_grpo.weights.package import SELF_TEST

# Statistics are not worth a longer wait, because every rank waits for the end of its step
PROGRESS_TIMEOUT_S = 1.0
# After so many worker losses in a row without progress, the group itself is probably the cause. If every loss counted, most
# groups that are set aside would be long ones, which are lost most often
ATTEMPTS_WITHOUT_PROGRESS = 4
MAX_ATTEMPTS = 16  # at one group, with progress or without
INITIAL_MEAN_LENGTH_TOKENS = 64.0
MEAN_LENGTH_UPDATE = 0.01  # weight of a new completion in the moving average


@dataclass
class _Worker:
    """A worker that has joined."""

    info: WorkerInfo
    handle: Any
    link: WorkerLink
    # It joined during a run and has not proven the current weights. Until then, only a sync for late workers includes it
    is_late: bool
    gone: asyncio.Future[str]  # why it is no longer a member
    progress: asyncio.Future[dict[str, Any]] | None = None  # an answer that `take_stats` has not counted yet


class RegisteredWorkers:
    """The workers of one kind.

    Args:
        kind: "generation", "reference" or "proximal".
        grace_s: Seconds that work waits while no worker is registered.
        connect: Makes a link to a worker of its handle.
        policy: Chooses the worker that gets the next work.
    """

    def __init__(self, kind: str, grace_s: float, connect: Connect, policy: SchedulingPolicy) -> None:
        self.kind = kind
        self._connect = connect
        self.is_frozen = kind == "reference"  # its workers keep the weights that they start with
        self.registry = WorkerRegistry(kind, grace_s, policy)
        self.by_id: dict[str, _Worker] = {}
        self._has_weights = False  # weights have landed, so that a worker that joins now is late
        self._sync_began_at = 0.0  # Unix time of the sync under way; 0 if none is
        self._syncs: deque[Span] = deque(maxlen=MOST)
        self._last_lost: WorkerLost | None = None
        self._loss_messages: list[str] = []  # since the last `take_lost`
        self._no_sync = asyncio.Event()  # cleared while weights are being sent
        self._no_sync.set()

    async def register(self, info: WorkerInfo, handle: Any) -> bool:
        """Register a worker, after the sync that is under way.

        Returns:
            Whether the worker is late: it needs a sync of its own before it gets work. Any other worker takes part in the
            next sync.
        """
        await self._no_sync.wait()
        worker_id = info.worker_id
        is_late = self._has_weights
        # Otherwise the loss of the old link would fence the new worker
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
        """Remove a worker that has ended or is fenced. Unknown ids are ignored, because a loss may be reported twice."""
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
        """Give no more work to a worker, and remove it when it has finished its work or `within_s` have passed."""
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
        """Wait until a worker is no longer a member, and return the reason."""
        worker = self.by_id.get(worker_id)
        return await asyncio.shield(worker.gone) if worker else "it is no member"

    def begin_sync(self, for_late: bool = False) -> list[tuple[WorkerInfo, Any]]:
        """Begin a weight sync, during which no worker joins.

        Args:
            for_late: The sync serves only the workers that joined late; otherwise it serves all others.

        Returns:
            The workers that the weights go to, with their handles.
        """
        if self.is_frozen:
            return []
        self._no_sync.clear()
        # A self-test belongs to the sync that follows it
        self._sync_began_at = self._sync_began_at or time.time()
        return [(worker.info, worker.handle) for worker in self.by_id.values() if worker.is_late == for_late]

    def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """End a weight sync, and let the workers that have proven the weights work. After a self-test the sync goes on.

        Args:
            package: The weights that were sent.
            landed: Ids of the workers that have proven them.
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
        """Lease places in a worker for the block, waiting for a worker that has room.

        A `WorkerLost` that leaves the block fences the worker and is not raised.

        Args:
            work: Name of the work, for reports of what the run waits for.
            count: Number of sequences, which the worker takes all at once.
            tokens_each: Expected tokens of each sequence.
            prefers: Id of the worker whose prefix cache holds the beginning of the sequences, if there is one.
        """
        with waiting("place", work, f"a place in a {self.kind} worker"):
            lease = await self.registry.acquire(count, tokens_each, prefers)
        worker = self.by_id[lease.worker_id]
        try:
            with waiting("worker", work, f"{self.kind} worker {lease.worker_id}"):
                yield worker.link, lease
        except WorkerLost as error:
            self._last_lost = error
            # The worker may have registered again since: the new one is not fenced
            if self.by_id.get(lease.worker_id) is worker:
                self.deregister(lease.worker_id, str(error))
        finally:
            self.registry.release(lease, lease.sequences)


def _ignore_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the error of a task that nobody awaits any more: asyncio would log it otherwise."""
    if not task.cancelled():
        task.exception()


class _UnfinishedCompletions:
    """The completions of one prompt that are still to be generated.

    Args:
        seeds: Seed of each completion, by its index in the group.
    """

    def __init__(self, seeds: dict[int, int]) -> None:
        self.seeds = seeds
        self._tokens: dict[int, Tokens] = {}  # sampled so far as workers have reported, by index in the group

    @property
    def progress(self) -> tuple[int, int]:
        """Return a value that changes when a completion finishes or gets tokens."""
        num_tokens = sum(len(tokens) for tokens in self._tokens.values())
        return len(self.seeds), num_tokens

    @property
    def most_tokens(self) -> int:
        """Return the number of tokens of the longest completion so far."""
        return max((len(tokens) for tokens in self._tokens.values()), default=0)

    @property
    def begun(self) -> dict[int, Tokens] | None:
        """Return the tokens that the next engine continues after, by index in the group.

        None if no engine has reported tokens: an engine that never does need not take the argument.
        """
        if not self._tokens:
            return None
        return {member: self._tokens[member] for member in self.seeds if member in self._tokens}

    def add_tokens(self, new_tokens: Mapping[int, Tokens]) -> None:
        """Append the tokens that unfinished completions got since the last report."""
        for member, new in new_tokens.items():
            tokens = self._tokens.get(member)
            self._tokens[member] = new if tokens is None else tokens + new


class GenerationWorkers(RegisteredWorkers):
    """`Generation` by the registered workers.

    Args:
        seed: The run's seed, from which the seed of every completion follows.
        common: Arguments of `RegisteredWorkers` after the kind.
    """

    def __init__(self, seed: int, *common: Any) -> None:
        super().__init__(GENERATION, *common)
        self._seed = seed
        # Moving average of the completions' lengths: the registry balances workers by expected tokens
        self._mean_length = INITIAL_MEAN_LENGTH_TOKENS

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions as they finish. If a worker is lost, another one continues its completions.

        Args:
            prompt: The prompt.
            count: Number of completions.
            sampling: Overrides of the run's sampling settings.
            session: The trajectory whose next turn the one completion is.

        Raises:
            PromptSetAside: Too many workers were lost over the prompt.
        """
        members = [session.member] if session else list(range(count))
        session = session or Session(0)
        # Every worker gets the same seeds. New draws after a loss would favor short completions, because long ones are lost
        # more often
        seeds = {}
        for member in members:
            seeds[member] = request_seed(self._seed, prompt.ordinal, member, session.turn)
        session.turn += 1
        unfinished = _UnfinishedCompletions(seeds)
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
                if unfinished.begun is not None:
                    arguments.append(unfinished.begun)
                reports = link.stream("complete", *arguments)
                async with aclosing(reports):
                    async for report in reports:
                        if not isinstance(report, Completion):
                            unfinished.add_tokens(report)
                            continue
                        del unfinished.seeds[report.member]
                        # Its place serves other work while the rest of the group generates
                        self.registry.release(lease)
                        self._mean_length += MEAN_LENGTH_UPDATE * (len(report) - self._mean_length)
                        yield report
            if not unfinished.seeds:
                return
            has_progressed = unfinished.progress != progress_before
            num_futile_attempts = 0 if has_progressed else num_futile_attempts + 1
            if num_futile_attempts == ATTEMPTS_WITHOUT_PROGRESS:
                break
        raise PromptSetAside(f"worker after worker was lost over prompt {prompt.ordinal}: {self._last_lost}")

    async def take_stats(self) -> dict[str, Any]:
        """Return the engines' statistics since the last call; see `Generation`.

        An engine that does not answer at once is counted in a later step.
        """
        progress_by_worker = await self._take_progress()
        spans = list(self._syncs)
        self._syncs.clear()
        token_timeline = []
        busy = []
        for worker_id, progress in progress_by_worker.items():
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
            "workers_lost": self.take_lost(),
        }

    async def _take_progress(self) -> dict[str, dict[str, Any]]:
        """Return the answers to `Engine.progress` of the workers that give one in time, by worker id."""
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
            # A call at the end of another step may have counted the answer
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
    """`Logprobs` by the registered workers."""

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """Return the log-probs of the worker with the fewest outstanding tokens; see `Logprobs`.

        Raises:
            WorkerLost: Every worker that was tried was lost.
        """
        num_tokens = sum(len(sequence) for sequence in sequences)
        tokens_each = max(1, num_tokens // len(sequences))
        for _ in range(ATTEMPTS_WITHOUT_PROGRESS):
            async with self.lease("a group", len(sequences), tokens_each) as (link, _):
                return await link.call("logprobs", list(sequences), list(prompt_lengths))
        raise WorkerLost(
            f"{ATTEMPTS_WITHOUT_PROGRESS} {self.kind} workers were lost over one group: {self._last_lost}"
        )
