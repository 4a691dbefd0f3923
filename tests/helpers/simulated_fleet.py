"""The workers of a `SimulatedRun` and their dispatchers: who joins, who is lost, and what is asked of them."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from schedules import Event, Schedule
from simulated_workers import SILENCE_S, SimulatedLink, SimulatedWorker

from async_grpo.cluster.controller import RunController
from async_grpo.errors import WorkerLost
from async_grpo.messages import WorkerInfo
from async_grpo.protocols import WeightPackage
from async_grpo.types import GENERATION
from async_grpo.weights.package import SELF_TEST


class SimulatedFleet:
    """Of each event that is about a worker, the method of its name with an underscore makes it happen."""

    controller: RunController

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.draw = schedule, random.Random(schedule.seed)
        self.happened: Counter[str] = Counter()
        self.kinds = (GENERATION, *schedule.roles)
        self.workers: list[SimulatedWorker] = []
        self.tasks: set[asyncio.Task[Any]] = set()  # that end with the controller
        self.version = self._names = 0
        self.is_training = False

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.add(task := asyncio.create_task(coroutine))
        return task

    def _connect(
        self, worker: SimulatedWorker, name: str, on_lost: Callable[[WorkerLost], None]
    ) -> SimulatedLink:
        return SimulatedLink(worker, name, on_lost, self._watch)

    def _watch(self, link: SimulatedLink, sequences: int) -> None:
        """A request is about to be made."""
        worker = link.worker
        if not sequences:
            return
        name, is_frozen = worker.info.worker_id, worker.info.kind == "reference"
        assert not link.is_closed, f"{name} is asked after it was fenced"
        assert not worker.is_leaving, f"{name} is asked while it drains"
        assert worker.has_proven or is_frozen, f"{name} is asked before its weights were proven"
        current = self.version - 1 <= worker.version <= self.version
        assert current or is_frozen, f"{name} with version {worker.version} is asked at {self.version}"
        open_now = link.open + sequences
        assert open_now <= worker.info.max_sequences, f"{name} is given {open_now} sequences"

    def _bring(self, kind: str, after_s: float, name: str = "") -> None:
        """A worker of that kind joins."""

        async def come() -> None:
            await asyncio.sleep(after_s)
            self._names += 1
            info = WorkerInfo(name or f"{kind}{self._names}", kind, self.schedule.places, 1000)
            self.workers.append(worker := SimulatedWorker(info, self.draw))
            await self.controller.register(info, worker)
            self.happened["joined"] += 1

        self.spawn(come())

    def _lose(self, worker: SimulatedWorker) -> None:
        """It is no more; another one comes in its place."""
        if not worker.is_dead:
            self.happened["workers lost"] += 1
            worker.die()
            self._bring(worker.info.kind, self.draw.uniform(0.5, 30))

    async def _sign_off(self, worker: SimulatedWorker, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        await self.controller.deregister(worker.info.kind, worker.info.worker_id, "it told so")

    def alive(self) -> list[SimulatedWorker]:
        return [worker for worker in self.workers if not worker.is_dead]

    def _die(self, worker: SimulatedWorker, lasts: float) -> None:
        self._lose(worker)
        self.spawn(self._sign_off(worker, lasts))  # its dispatcher tells, too

    def _fail(self, worker: SimulatedWorker, lasts: float) -> None:
        worker.is_broken = True

        async def end() -> None:
            await asyncio.sleep(lasts)
            self._lose(worker)

        self.spawn(end())

    def _again(self, worker: SimulatedWorker, lasts: float) -> None:
        self.happened["workers lost"] += 1
        worker.die()
        self._bring(worker.info.kind, lasts / 30, worker.info.worker_id)

    def _leave(self, worker: SimulatedWorker, lasts: float) -> None:
        self.spawn(self._sign_off(worker))
        self._lose(worker)

    def _drain(self, worker: SimulatedWorker, lasts: float) -> None:
        async def end() -> None:
            worker.is_leaving = True
            await self.controller.drain(worker.info.kind, worker.info.worker_id, lasts)
            self._lose(worker)
            await self._sign_off(worker)

        self.spawn(end())

    def _stall(self, worker: SimulatedWorker, lasts: float) -> None:
        worker.stall(lasts)
        if lasts > SILENCE_S:

            async def give_up() -> None:
                await asyncio.sleep(SILENCE_S)
                self._lose(worker)

            self.spawn(give_up())

    def _refuse(self, worker: SimulatedWorker, lasts: float) -> None:
        worker.will_refuse = True

    def _join(self, event: Event) -> None:
        self._bring(self.kinds[event.who % len(self.kinds)], 0.0)

    async def _sync(self, self_test: bool = False, for_late: bool = False) -> None:
        """As `Publisher` and `RayEngines` do."""
        for version in [SELF_TEST, self.version] if self_test else [self.version]:
            package = WeightPackage(version, {}, [], [], np.zeros(0), 1e-4, for_late)
            sent = [worker for _, worker in await self.controller.begin_sync(for_late)]
            loaded = await asyncio.gather(*(worker.load(version) for worker in sent), return_exceptions=True)
            took = {worker.info.worker_id for worker, lost in zip(sent, loaded, strict=True) if lost is None}
            refusing = {w.info.worker_id for w in sent if w.will_refuse} & took
            if version != SELF_TEST and (len(took) > len(refusing) or for_late):
                took -= refusing  # when none proves its weights, the run ends
                self.happened["proofs failed"] += len(refusing)
            for worker in sent:
                if worker.info.worker_id in took:
                    worker.was_tested |= version == SELF_TEST
                    worker.has_proven = worker.was_tested and version == self.version
                else:
                    self._lose(worker)
                    await self._sign_off(worker)
            await asyncio.sleep(self.draw.choice((0.0, 0.5)))
            await self.controller.end_sync(package, sorted(took))
            self.happened["syncs"] += 1

    async def _events(self) -> None:
        begun = asyncio.get_running_loop().time()
        stop = [Event(self.schedule.stops_at, "stop")] if self.schedule.stops_at is not None else []
        for event in sorted([*self.schedule.events, *stop], key=lambda event: event.at):
            await asyncio.sleep(begun + event.at - asyncio.get_running_loop().time())
            for _ in range(event.passes):
                await asyncio.sleep(0)
            among = self.alive()
            if event.what in ("die", "fail", "again", "leave", "drain", "stall", "refuse"):
                if among:
                    getattr(self, f"_{event.what}")(among[event.who % len(among)], event.lasts)
                    self.happened[event.what] += 1
            elif self.is_training or event.what in ("join", "stop"):
                getattr(self, f"_{event.what}")(event)
                self.happened[event.what] += 1
