"""`RegisteredWorkers`: the workers of one kind, the way to each of them, and the weights that they must hold to work.

Plain asyncio without Ray: what joins is a handle, and `connect` makes of it a link to call.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from async_grpo.errors import WorkerLost
from async_grpo.experience.worker_registry import Lease, SchedulingPolicy, WorkerRegistry
from async_grpo.protocols import Connect, WeightPackage, WorkerLink
from async_grpo.types import WorkerInfo

PROGRESS_TIMEOUT_S = 1.0  # statistics are worth no longer wait: every rank waits for the end of its step


class RegisteredWorkers:
    """One per kind of worker.

    Args:
        kind: "generation", "reference" or "proximal".
        grace_s: how long `lease` waits while no worker at all is registered.
        connect: makes the link to a worker of its handle.
        policy: which worker gets the next piece of work.
    """

    def __init__(self, kind: str, grace_s: float, connect: Connect, policy: SchedulingPolicy) -> None:
        self.kind, self._connect = kind, connect
        self.registry = WorkerRegistry(kind, grace_s, policy)
        self._handles: dict[str, Any] = {}
        self._links: dict[str, WorkerLink] = {}
        self._rewards: dict[str, str] = {}
        self._joining: set[str] = set()  # on their own way to the current weights: no sync may cross it
        self._self_test: list[WeightPackage] = []
        self._package: WeightPackage | None = None
        self._asked: dict[str, asyncio.Future[dict[str, Any]]] = {}  # for their progress, and silent so far
        self._settled = asyncio.Event()  # cleared while weights are being sent
        self._settled.set()

    @property
    def is_frozen(self) -> bool:
        """Whether its workers keep the weights that they started with."""
        return self.kind == "reference"

    # Joining and leaving ----------------------------------------------------------------------------------------

    async def register(self, info: WorkerInfo, handle: Any, rewards: str) -> list[WeightPackage]:
        """Let a worker in; returns what it must load, and prove, before `activate`.

        Nothing before the first sync, which it then takes part in, and nothing where weights travel outside the
        packages (NCCL): there it waits for the next sync.
        """
        await self._settled.wait()
        self.registry.register(info)
        self._handles[info.worker_id], self._rewards[info.worker_id] = handle, rewards
        self._links[info.worker_id] = self._connect(
            handle,
            f"{self.kind} worker {info.worker_id}",
            lambda lost: self.deregister(info.worker_id, str(lost)),
        )
        if self.is_frozen:
            self.registry.activate(info.worker_id)
        current = await self.current()
        if not self._self_test or not current:
            return []
        self._joining.add(info.worker_id)
        return [*self._self_test, *current]

    async def activate(self, worker_id: str, version: int) -> bool:
        """A late worker has loaded `version`; False if that is no longer the current one (it must load again).

        Raises:
            WorkerLost: it was fenced meanwhile.
        """
        await self._settled.wait()
        if worker_id not in self._handles:
            raise WorkerLost(f"worker {worker_id} was given up while it loaded the current weights")
        if self._package is None or self._package.version != version:
            return False
        self._joining.discard(worker_id)
        self.registry.activate(worker_id)
        return True

    async def current(self) -> list[WeightPackage]:
        """The current weights, if they are in a package."""
        await self._settled.wait()
        return [self._package] if self._package is not None and self._package.chunks else []

    def deregister(self, worker_id: str, reason: str) -> None:
        """A worker is gone, or fenced: it gets no more work. Unknown ids are ignored (it may be told twice)."""
        self._handles.pop(worker_id, None)
        self._rewards.pop(worker_id, None)
        self._joining.discard(worker_id)
        self.registry.deregister(worker_id, reason)
        if link := self._links.pop(worker_id, None):
            link.close()

    def roll_call(self) -> tuple[list[WorkerInfo], list[str]]:
        """The members, and the rewards that each of them names."""
        members = self.registry.members()
        return members, [self._rewards[member.worker_id] for member in members]

    # Weights ----------------------------------------------------------------------------------------------------

    def begin_sync(self) -> list[tuple[WorkerInfo, Any]]:
        """Weights are about to be sent: no worker joins meanwhile. Returns those that get them, with their handles.

        A worker that is joining is left out: it loads the current package by itself, and again if this comes first.
        """
        self._settled.clear()
        members = [info for info in self.registry.members() if info.worker_id not in self._joining]
        return [(info, self._handles[info.worker_id]) for info in members]

    def keep_self_test(self, package: WeightPackage) -> None:
        """The next of what every late worker is tested with, as the first ones were."""
        self._self_test.append(package)

    def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """`landed` hold the weights of `package`: they may work, and no other worker may."""
        self._package = package
        for worker_id in set(landed) & set(self._handles):
            self.registry.activate(worker_id)
        self._settled.set()

    # Work -------------------------------------------------------------------------------------------------------

    async def lease(self, sequences: int, tokens_each: int) -> "LeasedWorker":
        """Wait for a worker that takes `sequences` at once; see `WorkerRegistry.acquire`."""
        lease = await self.registry.acquire(sequences, tokens_each)
        return LeasedWorker(self, lease, self._links[lease.worker_id])

    async def progress(self, timeout_s: float = PROGRESS_TIMEOUT_S) -> list[dict[str, Any]]:
        """What the workers did since they were last asked; a silent one's answer is among those of a later call.

        One that is lost meanwhile is left out (its work will tell).
        """
        for worker_id, link in self._links.items():
            if worker_id not in self._asked:
                self._asked[worker_id] = asyncio.ensure_future(link.call("progress"))
        if not self._asked:
            return []
        done, _ = await asyncio.wait(self._asked.values(), timeout=timeout_s)
        self._asked = {worker_id: task for worker_id, task in self._asked.items() if task not in done}
        return [task.result() for task in done if not isinstance(task.exception(), WorkerLost)]


class LeasedWorker:
    """One worker, for as many sequences as were leased."""

    def __init__(self, workers: RegisteredWorkers, lease: Lease, link: WorkerLink) -> None:
        self._workers, self._lease, self._link = workers, lease, link

    async def call(self, method: str, *args: Any) -> Any:
        return await self._link.call(method, *args)

    def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        return self._link.stream(method, *args)

    def release(self, sequences: int = 1) -> None:
        """Give sequences back; those of a worker that was fenced are void already."""
        self._workers.registry.release(self._lease, sequences)

    def fence(self, lost: WorkerLost) -> None:
        """The worker is gone: it gets no more work."""
        self._workers.deregister(self._lease.worker_id, str(lost))
