"""The verifier pool as actors: one pool, and for each adapter some actors with killable processes, on any node."""

from collections.abc import Sequence
from typing import Any

import ray

from async_grpo.cluster.actors import light
from async_grpo.cluster.channel import Channel, ChannelServer
from async_grpo.rewards.pool import VerifierPool
from async_grpo.rewards.process import AdapterProcess
from async_grpo.rewards.source import RewardSource
from async_grpo.types import AdapterResult, Verdict

SLOTS_PER_ACTOR = 8  # adapter processes of one verifier actor: they share its messages, and a node


class VerifierActor(ChannelServer):
    """Some killable processes of one adapter, on any node; each scores one sample at a time."""

    def __init__(self, source: RewardSource, adapter: str) -> None:
        self._source, self._adapter = source, adapter
        self._slots: dict[int, AdapterProcess] = {}
        self.serve({"open": self._open, "score": self._score, "close": self._close})

    async def _open(self, slot: int) -> None:
        self._slots[slot] = AdapterProcess(self._source, self._adapter)
        await self._slots[slot].start()

    async def _score(self, slot: int, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        return await self._slots[slot].score(sample, timeout_s)

    async def _close(self, slot: int) -> None:
        await self._slots.pop(slot).close()


class VerifierPoolActor(ChannelServer):
    """A `VerifierPool` whose workers are the slots of `VerifierActor`s."""

    def __init__(self, source: RewardSource, adapters: Sequence[str], workers: int, timeout_s: float) -> None:
        self._source = source
        self._pool = VerifierPool(adapters, self._make_worker, workers=workers, timeout_s=timeout_s)
        self._hosts: dict[str, list[_VerifierHost]] = {adapter: [] for adapter in adapters}
        self.serve({"verify": self._verify, "take_stats": self._take_stats})

    async def start(self) -> None:
        await self._pool.start()

    async def _make_worker(self, adapter: str) -> "_VerifierSlot":
        hosts = self._hosts[adapter] = [host for host in self._hosts[adapter] if not host.channel.lost]
        host = next((host for host in hosts if len(host.slots) < SLOTS_PER_ACTOR), None)
        if host is None:
            host = _VerifierHost(self._source, adapter)
            hosts.append(host)
        slot = _VerifierSlot(host, min(set(range(SLOTS_PER_ACTOR)) - host.slots))
        await slot.open()
        return slot

    async def _verify(self, sample: dict[str, Any]) -> Verdict:
        return await self._pool.verify(sample)

    async def _take_stats(self) -> dict[str, Any]:
        return self._pool.take_stats()


class _VerifierHost:
    """A `VerifierActor` as the pool sees it."""

    def __init__(self, source: RewardSource, adapter: str) -> None:
        self.actor = light(VerifierActor, scheduling_strategy="SPREAD").remote(source, adapter)
        self.channel = Channel(self.actor, f"verifier of {adapter}")
        self.slots: set[int] = set()


class _VerifierSlot:
    """`VerifierWorker`: one process of a `VerifierActor`."""

    def __init__(self, host: _VerifierHost, slot: int) -> None:
        self._host, self._slot = host, slot
        host.slots.add(slot)

    async def open(self) -> None:
        try:
            await self._host.channel.call("open", self._slot)
        except BaseException:
            self._host.slots.discard(self._slot)
            raise

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        return await self._host.channel.call("score", self._slot, sample, timeout_s)

    async def close(self) -> None:
        """End the process; with the last one its actor goes, too."""
        self._host.slots.discard(self._slot)
        if self._host.slots and not self._host.channel.lost:
            await self._host.channel.call("close", self._slot)
        else:
            self._host.channel.close()
            ray.kill(self._host.actor)
