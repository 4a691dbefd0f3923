"""Workers in virtual time, and the links to them, which fail as those over Ray do."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
from simulated_samples import tokens_of

from async_grpo.errors import WorkerLost
from async_grpo.messages import WorkerInfo
from async_grpo.types import Completion, FinishReason, Tokens

SILENCE_S = 40.0  # a link whose worker is silent for so long is lost
ITEM, END = "item", "end"


class SimulatedWorker:
    """What an actor does: it answers, holds weights, stalls, fails and dies. `has_proven`: the weights that it holds."""

    def __init__(self, info: WorkerInfo, draw: random.Random) -> None:
        self.info, self._draw = info, draw
        self.version = 0 if info.kind == "reference" else -2
        self.is_dead = self.is_broken = self.will_refuse = self.was_tested = self.has_proven = False
        self.is_leaving = False
        self.links: list[SimulatedLink] = []
        self.answering: set[asyncio.Task[None]] = set()
        self._until = 0.0  # it stalls, or is paused
        self.death = asyncio.Event()

    def die(self) -> None:
        """Its links notice a little later."""
        self.is_dead = True
        self.death.set()
        for task in self.answering:
            task.cancel()
        for link in self.links:
            link.fail_in(self._draw.uniform(0, 2), "died")

    def stall(self, seconds: float) -> None:
        self._until = max(self._until, asyncio.get_running_loop().time() + seconds)
        if seconds > SILENCE_S:
            for link in self.links:
                link.fail_in(SILENCE_S, "did not answer")

    async def works(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while (left := self._until - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(left)

    async def load(self, version: int) -> None:
        """Take weights; open requests are paused, and go on with these. WorkerLost: it dies over it."""
        seconds = self._draw.uniform(0, 1.5)
        self.stall(seconds)
        loading = asyncio.create_task(self.works(seconds))
        dying = asyncio.create_task(self.death.wait())
        try:
            await asyncio.wait((loading, dying), return_when="FIRST_COMPLETED")
        finally:
            loading.cancel()
            dying.cancel()
        if self.is_dead:
            raise WorkerLost(f"{self.info.worker_id} died")
        self.version = version

    async def answer(self, method: str, args: tuple[Any, ...], tell: Callable[[str, Any], None]) -> None:
        if self.is_broken and method != "progress":
            tell(ITEM, WorkerLost(f"{self.info.worker_id} takes no more requests"))
        elif method == "complete":
            await self._complete(*args, tell=tell)
        elif method == "progress":
            await self.works(self._draw.choice((0.0, 0.1, 3.0)))
            tell(ITEM, {"token_timeline": [], "paused_s": 0.0, "busy": []})
        else:
            sequences, prompt_lengths = args
            await self.works(self._draw.random())
            lengths = [len(s) - n for s, n in zip(sequences, prompt_lengths, strict=True)]
            tell(ITEM, [np.zeros(n, np.float32) for n in lengths])
        tell(END, None)

    async def _complete(
        self,
        prompt: np.ndarray,
        seeds: Mapping[int, int],
        sampling: Any,
        begun: Mapping[int, Tokens] | None = None,
        *,
        tell: Callable[[str, Any], None],
    ) -> None:
        """It tells of some of the tokens of a completion before that is finished."""

        async def one(member: int, seed: int) -> None:
            has = begun[member].versions.tolist() if begun and member in begun else []
            ids, versions, told = tokens_of(seed, member), list(has), len(has)
            assert not has or begun[member].token_ids.tolist() == ids[:told], "it is given other tokens"
            while len(versions) < len(ids):
                await self.works(self._draw.choice((0.0, 0.3, 3.0)) * self._draw.random())
                versions.append(self.version)
                if len(versions) < len(ids) and self._draw.random() < 0.3:
                    tell(ITEM, {member: Tokens(*_arrays(ids, versions, told))})
                    told = len(versions)
            finished = FinishReason.STOP, "x" * len(ids), None, member
            tell(ITEM, Completion(*_arrays(ids, versions, 0), *finished))

        async with asyncio.TaskGroup() as tasks:
            for member, seed in seeds.items():
                tasks.create_task(one(member, seed))


def _arrays(ids: list[int], versions: list[int], begin: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, log-probs and versions, of the tokens that there are from `begin` on."""
    ids = ids[begin : len(versions)]
    return (
        np.array(ids, np.int32),
        np.zeros(len(ids), np.float32),
        np.array(versions[begin:], np.int32),
    )


class SimulatedLink:
    """`WorkerLink`. `watch`: is told of every request of this link, before it is made."""

    def __init__(
        self,
        worker: SimulatedWorker,
        name: str,
        on_lost: Callable[[WorkerLost], None],
        watch: Callable[["SimulatedLink", int], None],
    ) -> None:
        self.worker, self.name, self._watch = worker, name, watch
        self._on_lost: Callable[[WorkerLost], None] | None = on_lost
        self.lost: WorkerLost | None = None
        self.open = 0  # sequences
        self.is_closed = False
        self._pending: set[asyncio.Queue[tuple[str, Any]]] = set()
        worker.links.append(self)
        if worker.is_dead:
            self.fail_in(1.0, "died before")

    async def call(self, method: str, *args: Any) -> Any:
        async with aclosing(self.stream(method, *args)) as answers:
            return await anext(answers)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        if self.lost:
            raise self.lost
        sequences = 0 if method == "progress" else len(args[1])
        self._watch(self, sequences)
        self.open += sequences
        answers: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._pending.add(answers)
        worker = self.worker
        task = None
        if not worker.is_dead:
            task = asyncio.create_task(worker.answer(method, args, lambda *said: answers.put_nowait(said)))
            worker.answering.add(task)
            task.add_done_callback(worker.answering.discard)
        try:
            while (said := await answers.get())[0] != END:
                if isinstance(said[1], WorkerLost):
                    raise said[1]
                done = sequences if method != "complete" else int(isinstance(said[1], Completion))
                sequences, self.open = sequences - done, self.open - done
                yield said[1]
        finally:
            self.open -= sequences
            self._pending.discard(answers)
            if task:
                task.cancel()

    def fail_in(self, seconds: float, why: str) -> None:
        asyncio.get_running_loop().call_later(seconds, self._fail, WorkerLost(f"{self.name} {why}"))

    def _fail(self, error: WorkerLost) -> None:
        self.lost = self.lost or error
        for answers in self._pending:
            answers.put_nowait((ITEM, self.lost))
        if self._on_lost is not None:
            self._on_lost(error)

    def close(self) -> None:
        self._on_lost, self.is_closed = None, True
        self._fail(WorkerLost(f"the link to {self.name} was closed"))
