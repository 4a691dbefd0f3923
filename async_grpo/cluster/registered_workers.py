"""The workers of each kind: who has joined, the weights that they must hold to work, and the work that they are given.

Plain asyncio without Ray: what joins is a handle, and `connect` makes of it a link to call.
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

from async_grpo.errors import PromptSetAside, WorkerLost
from async_grpo.experience.worker_registry import Lease, SchedulingPolicy, WorkerRegistry
from async_grpo.messages import WorkerInfo
from async_grpo.metrics.spans import MOST, Span, condensed
from async_grpo.processes.waits import waiting
from async_grpo.protocols import Connect, WeightPackage, WorkerLink
from async_grpo.types import GENERATION, Completion, Prompt, Sampling, Session, Tokens
from async_grpo.weights.package import SELF_TEST

PROGRESS_TIMEOUT_S = 1.0  # statistics are worth no longer wait: every rank waits for the end of its step
# Of one group: when so many workers were lost over it that brought it no further, it looks like the group's own fault. Were
# all losses counted, it would be mostly long completions that are set aside; some end it has all the same
ATTEMPTS, MOST_ATTEMPTS = 4, 16


@dataclass
class _Worker:
    """One that has joined."""

    info: WorkerInfo
    handle: Any
    link: WorkerLink
    is_late: bool  # it joined a run under way, and has not proven the current weights yet: no other sync may cross it
    gone: asyncio.Future[str]  # why it is no member any more
    progress: asyncio.Future[dict[str, Any]] | None = None  # asked for, and not yet taken


class RegisteredWorkers:
    """One per kind of worker: "generation", "reference" or "proximal". See `RunController` for the arguments."""

    def __init__(self, kind: str, grace_s: float, connect: Connect, policy: SchedulingPolicy) -> None:
        self.kind, self._connect = kind, connect
        self.is_frozen = kind == "reference"  # its workers keep the weights that they start with
        self.registry = WorkerRegistry(kind, grace_s, policy)
        self.by_id: dict[str, _Worker] = {}
        self._is_live = False  # weights have landed: who joins now is late
        self._sync_begun = 0.0  # when the one under way did, in Unix seconds; 0: none is
        self._syncs: deque[Span] = deque(maxlen=MOST)
        self._last_lost: WorkerLost | None = None
        self._lost: list[str] = []  # since they were last asked for
        self._settled = asyncio.Event()  # cleared while weights are being sent
        self._settled.set()

    async def register(self, info: WorkerInfo, handle: Any) -> bool:
        """Let a worker in; it takes part in the next sync. True: it is late, and needs one of its own before."""
        await self._settled.wait()
        worker_id, is_late = info.worker_id, self._is_live
        self.deregister(worker_id, "it registered again")  # or the loss of its old link would fence it
        self.registry.register(info)
        name = f"{self.kind} worker {worker_id}"
        link = self._connect(handle, name, lambda lost: self.deregister(worker_id, str(lost)))
        gone = asyncio.get_running_loop().create_future()
        self.by_id[worker_id] = _Worker(info, handle, link, is_late, gone)
        if self.is_frozen:
            self.registry.activate(worker_id)
        return is_late

    def deregister(self, worker_id: str, reason: str) -> None:
        """A worker is gone, or fenced: it gets no more work. Unknown ids are ignored (it may be told twice)."""
        self.registry.deregister(worker_id, reason)
        if worker := self.by_id.pop(worker_id, None):
            worker.link.close()
            if worker.progress:  # nobody asks any more, and asyncio would log the error that nobody read
                worker.progress.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
            worker.gone.set_result(reason)
            self._lost.append(f"{self.kind} worker {worker_id} was lost: {reason}")

    async def drain(self, worker_id: str, within_s: float) -> None:
        """No more work for a worker; when it has done what it has, or `within_s`, it is a member no more."""
        give_up = time.monotonic() + within_s
        self.registry.retire(worker_id)
        while self.registry.outstanding(worker_id) and time.monotonic() < give_up:
            await asyncio.sleep(0.1)
        left = self.registry.outstanding(worker_id)
        self.deregister(worker_id, f"it was told to end, {left} sequences go on elsewhere")

    def take_lost(self) -> list[str]:
        """The workers lost since the last call, and why."""
        lost, self._lost = self._lost, []
        return lost

    async def until_gone(self, worker_id: str) -> str:
        """Waits until a worker is no member any more; returns why."""
        worker = self.by_id.get(worker_id)
        return await asyncio.shield(worker.gone) if worker else "it is no member"

    def begin_sync(self, for_late: bool = False) -> list[tuple[WorkerInfo, Any]]:
        """Weights are about to be sent: no worker joins meanwhile. Returns those that get them, with their handles: the
        workers that joined late, or else all others."""
        if self.is_frozen:
            return []
        self._settled.clear()
        self._sync_begun = self._sync_begun or time.time()  # its self-test is part of it
        return [(worker.info, worker.handle) for worker in self.by_id.values() if worker.is_late == for_late]

    def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """`landed` hold the weights of `package`: they may work, and no other worker may. A self-test goes on."""
        if package.version == SELF_TEST or self.is_frozen:
            return
        self._is_live = True
        self._syncs.append(("weights", "sync", self._sync_begun, time.time()))
        self._sync_begun = 0.0
        for worker_id in set(landed) & set(self.by_id):
            self.by_id[worker_id].is_late = False
            self.registry.activate(worker_id)
        self._settled.set()

    @asynccontextmanager
    async def lease(
        self, who: str, count: int, tokens_each: int, prefers: str = ""
    ) -> AsyncIterator[tuple[WorkerLink, Lease]]:
        """The next worker that takes `count` sequences at once; `WorkerLost` in the block fences it, and is not raised."""
        with waiting("place", who, f"a place in a {self.kind} worker"):
            lease = await self.registry.acquire(count, tokens_each, prefers)
        worker = self.by_id[lease.worker_id]
        try:
            with waiting("worker", who, f"{self.kind} worker {lease.worker_id}"):
                yield worker.link, lease
        except WorkerLost as lost:
            self._last_lost = lost
            if self.by_id.get(lease.worker_id) is worker:  # or it has registered again since
                self.deregister(lease.worker_id, str(lost))
        finally:
            self.registry.release(lease, lease.sequences)


class GenerationWorkers(RegisteredWorkers):
    """`Generation` by the registered workers; `seed` is the run's, for every draw."""

    def __init__(self, seed: int, *common: Any) -> None:
        super().__init__(GENERATION, *common)
        self._seed = seed
        self._mean_length = 64.0  # of completions so far: the registry balances by expected tokens

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions as they finish; what a lost worker still owed goes on elsewhere.

        PromptSetAside: too many workers were lost over it.
        """
        session, members = session or Session(0), [session.member] if session else range(count)
        # Those of a lost worker, too: other draws would be short more often than the long ones that they replace
        owed = {member: request_seed(self._seed, prompt.ordinal, member, session.turn) for member in members}
        session.turn += 1
        begun = dict[int, Tokens]()  # what unfinished members have, as far as their worker told
        in_vain = 0
        for _ in range(MOST_ATTEMPTS):
            had = len(owed), sum(map(len, begun.values()))
            has = len(prompt.token_ids) + max(map(len, begun.values()), default=0)
            tokens_each = has + int(self._mean_length)
            who, prefers = f"prompt {prompt.ordinal}", session.worker_id
            async with self.lease(who, len(owed), tokens_each, prefers) as (link, lease):
                session.worker_id = lease.worker_id
                given = [{member: begun[member] for member in owed if member in begun}] if begun else []
                completions = link.stream("complete", prompt.token_ids, dict(owed), sampling, *given)
                async with aclosing(completions):
                    async for completion in completions:
                        if not isinstance(completion, Completion):
                            for member, new in completion.items():
                                begun[member] = begun[member] + new if member in begun else new
                            continue
                        del owed[completion.member]
                        self.registry.release(lease)  # its place, while its siblings generate
                        self._mean_length += 0.01 * (len(completion) - self._mean_length)
                        yield completion
            if not owed:
                return
            in_vain = in_vain + 1 if had == (len(owed), sum(map(len, begun.values()))) else 0
            if in_vain == ATTEMPTS:
                break
        raise PromptSetAside(f"worker after worker was lost over prompt {prompt.ordinal}: {self._last_lost}")

    async def take_stats(self) -> dict[str, Any]:
        """See `Generation`; an engine that does not answer at once is counted in a later step."""
        for worker in self.by_id.values():
            worker.progress = worker.progress or asyncio.ensure_future(worker.link.call("progress"))
        asked = {worker.progress: worker for worker in self.by_id.values() if worker.progress}
        done = (await asyncio.wait(asked, timeout=PROGRESS_TIMEOUT_S))[0] if asked else set()
        answers, spans = [], list(self._syncs)
        self._syncs.clear()
        for one in done:
            if asked[one].progress is not one:
                continue  # the end of another step has counted it
            asked[one].progress = None
            if not isinstance(one.exception(), WorkerLost):
                answers.append(one.result())
                engine = f"engine {asked[one].info.worker_id}"
                spans += [(engine, "generate", begin, end) for begin, end in answers[-1]["busy"]]
        return {
            "token_timeline": sorted(entry for answer in answers for entry in answer["token_timeline"]),
            "wait_generation_weights_s": sum(answer["paused_s"] for answer in answers),
            "busy": [interval for answer in answers for interval in answer["busy"]],
            "spans": condensed(spans),
            "workers_lost": self.take_lost(),
        }


def request_seed(seed: int, ordinal: int, member: int, turn: int = 0) -> int:
    """Of one completion: that turn of that member of the group of the prompt of that ordinal. 63 bits.

    >>> request_seed(37, 5, 0) == request_seed(37, 5, 0) != request_seed(37, 5, 1)
    True
    """
    of = f"{seed}/{ordinal}/{member}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(of.encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


class LogprobWorkers(RegisteredWorkers):
    """`Logprobs` by the registered workers."""

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """Ask the worker with the fewest tokens outstanding; another one if it is lost."""
        tokens_each = max(1, sum(map(len, sequences)) // len(sequences))
        for _ in range(ATTEMPTS):
            async with self.lease("a group", len(sequences), tokens_each) as (link, _):
                return await link.call("logprobs", list(sequences), list(prompt_lengths))
        raise WorkerLost(f"{ATTEMPTS} {self.kind} workers were lost over one group: {self._last_lost}")
