"""`RegistryActor`: a `WorkerRegistry`, the settings of the run, and the weights that a late worker must load first."""

import asyncio
from collections.abc import Sequence
from typing import Any

from async_grpo.cluster.channel import ChannelServer
from async_grpo.experience.worker_registry import Lease, WorkerRegistry
from async_grpo.types import SharedRunSettings, WorkerInfo
from async_grpo.weights.package import WeightPackage


class RegistryActor(ChannelServer):
    """One per kind of worker. Ends with rank 0's job."""

    def __init__(self, kind: str, settings: SharedRunSettings, grace_s: float) -> None:
        self._registry, self._settings = WorkerRegistry(kind, grace_s), settings
        self._handles: dict[str, Any] = {}
        self._rewards: dict[str, str] = {}
        self._refusals: list[str] = []
        self._joining: set[str] = set()  # on their own way to the current weights: no sync may cross it
        self._self_test: WeightPackage | None = None
        self._package: WeightPackage | None = None
        self._settled = asyncio.Event()  # cleared while weights are being sent
        self._settled.set()
        self._closed: asyncio.Future[str] = asyncio.get_event_loop().create_future()
        self.serve({"acquire": self._acquire, "release": self._release, "deregister": self.deregister})

    async def settings(self) -> SharedRunSettings:
        return self._settings

    async def register(self, info: WorkerInfo, handle: Any, rewards: str) -> list[WeightPackage]:
        """Let a worker in; returns what it must load, and prove, before `activate`.

        Nothing before the first sync, which it then takes part in, and nothing where weights travel outside the
        packages (NCCL): there it waits for the next sync.
        """
        await self._settled.wait()
        self._registry.register(info)
        self._handles[info.worker_id], self._rewards[info.worker_id] = handle, rewards
        if info.kind == "reference":  # frozen: it never waits for weights
            self._registry.activate(info.worker_id)
        current = await self.current()
        if self._self_test is None or not current:
            return []
        self._joining.add(info.worker_id)
        return [self._self_test, *current]

    async def activate(self, worker_id: str, version: int) -> bool:
        """A late worker has loaded `version`; False if that is no longer the current one (it must load again)."""
        await self._settled.wait()
        if self._package is None or self._package.version != version:
            return False
        self._joining.discard(worker_id)
        self._registry.activate(worker_id)
        return True

    async def current(self) -> list[WeightPackage]:
        """The current weights, if they are in a package."""
        await self._settled.wait()
        return [self._package] if self._package is not None and self._package.chunks else []

    async def keep_self_test(self, package: WeightPackage) -> None:
        """What every late worker is tested with, as the first ones were."""
        self._self_test = package

    async def refuse(self, reason: str) -> None:
        """A worker found that it cannot work for this run."""
        self._refusals.append(reason)

    async def deregister(self, worker_id: str, reason: str) -> None:
        self._handles.pop(worker_id, None)
        self._joining.discard(worker_id)
        self._registry.deregister(worker_id, reason)

    async def roll_call(self) -> tuple[list[WorkerInfo], list[str], list[str]]:
        """(members, the rewards each names, refusals)."""
        members = self._registry.members()
        return members, [self._rewards[member.worker_id] for member in members], self._refusals

    async def begin_sync(self) -> list[tuple[WorkerInfo, Any]]:
        """Weights are about to be sent: nobody joins meanwhile. Returns those who get them, with their handles.

        A worker that is joining is left out: it loads the current package by itself, and again if this comes first.
        """
        self._settled.clear()
        members = [info for info in self._registry.members() if info.worker_id not in self._joining]
        return [(info, self._handles[info.worker_id]) for info in members]

    async def end_sync(self, package: WeightPackage, landed: Sequence[str]) -> None:
        """`landed` hold the weights of `package`: they may work."""
        self._package = package
        for worker_id in set(landed) & set(self._handles):
            self._registry.activate(worker_id)
        self._settled.set()

    async def closed(self) -> str:
        """Waits for the end of the run (the dispatchers' way of noticing it)."""
        return await asyncio.shield(self._closed)

    async def close(self, reason: str) -> None:
        if not self._closed.done():
            self._closed.set_result(reason)

    async def _acquire(self, sequences: int, tokens_each: int) -> tuple[Lease, Any]:
        lease = await self._registry.acquire(sequences, tokens_each)
        return lease, self._handles[lease.worker_id]

    async def _release(self, lease_id: int, sequences: int) -> None:
        self._registry.release(lease_id, sequences)
