"""One reward in a killable process: deadlines are kept by SIGKILL, and a crash is tried once more."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.adapter.result import failure
from async_grpo.rewards.adapter.traits import AdapterTraits
from async_grpo.rewards.isolation.child_process import ChildProcess, ProcessDied
from async_grpo.rewards.isolation.framing import dumps
from async_grpo.rewards.isolation.serving import AmongOthers, Answers, InLine, NoAnswers
from async_grpo.types import AdapterResult, RewardStatus

CLOSE_S = 2.0  # for the `close` of a reward


class AdapterProcess:
    """A verifier worker (see `worker.VerifierWorker`) that runs one reward in a child process.

        worker = AdapterProcess(RewardRegistrySource.from_file("reward_registry.py"), "countdown")
        result = await worker.score({"completion": "...", "nums": [3, 4, 5], "target": 27}, timeout_s=30)

    The process is started by `start`, or by the first call, and anew after a time-out, a crash or a cancelled call:
    what an abandoned call may still answer is never read. It sees only an allow-list of environment variables.

    `capacity` calls are served at a time, more wait their turn. Where that is one, the next sample lies ready in the
    process's pipe; if the process ends for the one before it, it goes to the next process as if nothing had been.
    An async reward is told of a time-out or a cancellation; only if it does not let go of the sample within `grace_s`
    does it cost the process. A batch is stopped when nobody waits for it any more. Where several samples were served
    when the process died, nobody knows which one did it: each is tried again alone.

    Args:
        options: keyword options; the reward receives those that it names.
        memory_limit_bytes: address space of each process (RLIMIT_AS); None for no limit.
        max_processes: the process and all that it starts; beyond that they are ended.
        start_timeout_s: for starting, importing the page and warming up; not part of any sample's time-out.
        grace_s: for an async reward to obey.
        max_message_bytes: of one sample or one reply.
    """

    def __init__(
        self,
        source: RewardRegistrySource,
        adapter: str,
        options: Mapping[str, Any] | None = None,
        *,
        memory_limit_bytes: int | None = 8 * 2**30,
        max_processes: int = 128,
        start_timeout_s: float = 60.0,
        grace_s: float = 2.0,
        max_message_bytes: int = 16 * 2**20,
    ) -> None:
        self.adapter = adapter
        self.kind = AdapterTraits()  # until the process has said what it is
        self._start_timeout_s, self._grace_s = start_timeout_s, grace_s
        self._max_message_bytes, self._max_processes = max_message_bytes, max_processes
        self._greeting = {
            "source": asdict(source),
            "adapter": adapter,
            "options": dict(options or {}),
            "memory_limit_bytes": memory_limit_bytes,
            "max_message_bytes": max_message_bytes,
        }
        self.child: ChildProcess | None = None
        self.unheard: asyncio.Task[None] | None = None  # waits for what nobody else waits for any more
        self.closed = self._closes = False
        self._starting = asyncio.Lock()
        self._serving: InLine | AmongOthers = InLine(self)

    @property
    def capacity(self) -> int:
        """How many calls are served at a time; known once the process has been started."""
        return self.kind.capacity

    @property
    def prefetch(self) -> bool:
        """Whether more calls than that may be made, to be served next; their time starts when it is their turn."""
        return not (self.kind.is_async or self.kind.is_batch)

    @property
    def has_post_process(self) -> bool:
        """Whether the reward looks at whole groups; known once the process has been started."""
        return self.kind.has_post_process

    @property
    def pid(self) -> int | None:
        """Of the process that leads the others, None while there is none."""
        return self.child.pid if self.child and not self.child.lost else None

    async def start(self) -> None:
        """Start the process now, so that no sample waits for it.

        Raises:
            ConfigurationError: the page or the reward in it cannot be used.
            WorkerLost: the process died or was not ready in time.
        """
        async with self._starting:
            if self.closed:
                raise WorkerLost(f"the worker of {self.adapter!r} is closed")
            if self.child is None or self.child.lost:
                await self._start_child()

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Score one sample. A crash is tried once more, with what is left of the time-out.

        Never raises for what the sample makes the reward or its process do. WorkerLost once the worker is closed, when
        the process was ended for another sample, or when no time was left to try again alone.
        """
        asked_at = time.monotonic()
        (answer,), attempts = await self._tried("samples", [sample], timeout_s)
        latency_s = time.monotonic() - asked_at
        return AdapterResult(self.adapter, **_fields(answer), attempts=attempts, latency_s=latency_s)

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult], timeout_s: float
    ) -> list[AdapterResult]:
        """The group's results after the reward's `post_process_scores`, as they are if it has none; raises as `score`."""
        await self.start()
        if not self.kind.has_post_process:
            return list(results)
        group = [
            {"sample": sample, "status": result.status.value, "reward": result.reward, "extra": result.extra}
            | {"steps": result.steps, "reason": result.reason}
            for sample, result in zip(samples, results, strict=True)
        ]
        answers, _ = await self._tried("group", group, timeout_s)
        return [replace(result, **_fields(answer)) for result, answer in zip(results, answers, strict=True)]

    async def close(self) -> None:
        """End the process, for good; a call in flight raises WorkerLost."""
        self.closed = True
        if self.child is not None:
            if self._closes and self.child.idle:
                await self.child.dismiss(CLOSE_S)
            await self.child.end(f"the worker of {self.adapter!r} is closed")
        if self.unheard is not None:
            await asyncio.wait((self.unheard,))

    async def _tried(self, what: str, items: list[dict[str, Any]], timeout_s: float) -> tuple[Answers, int]:
        """The answers to the items, and the attempts that it took."""
        if self.child is None:  # the first start tells the kind; if it fails, the attempts below say why
            with contextlib.suppress(ConfigurationError, WorkerLost):
                await self.start()
        try:
            bodies = [dumps(item, self._max_message_bytes) for item in items]
        except (TypeError, ValueError) as error:
            return [failure(f"the sample cannot be sent: {error}") for _ in items], 1
        try:
            return await self._serving.serve(what, bodies, timeout_s)
        except NoAnswers as instead:
            return [failure(instead.reason, instead.status.value) for _ in items], instead.attempts

    async def abandon(self, child: ChildProcess, request_id: int) -> None:
        """Free the process of a request that nobody waits for."""
        try:
            if self.kind.is_async:
                await asyncio.wait((child.cancel(request_id),), timeout=self._grace_s)
        finally:
            if child.is_asked(request_id):
                await child.end(f"the process of {self.adapter!r} was ended for another sample")

    async def _start_child(self) -> None:
        """Start the process, and learn from it what it is."""
        child = self.child = ChildProcess(self.adapter, self._max_message_bytes, self._max_processes)
        try:
            reply = await child.greet(self._greeting)
            await asyncio.wait((reply,), timeout=self._start_timeout_s)
            if not reply.done():
                raise ProcessDied(
                    f"the process of {self.adapter!r} was not ready within {self._start_timeout_s:g} s"
                )
            message = reply.result()
            if "error" in message:
                raise ConfigurationError(f"reward function {self.adapter!r} cannot start: {message['error']}")
        except BaseException:
            await child.end(f"the process of {self.adapter!r} was ended while it started")
            raise
        self._closes = message["closes"]
        self.kind = AdapterTraits(**message["kind"])
        if not self.prefetch and not isinstance(self._serving, AmongOthers):
            self._serving = AmongOthers(self)


def process_maker(
    source: RewardRegistrySource, options: Mapping[str, Any] | None = None, **limits: Any
) -> Callable[[str], Awaitable[AdapterProcess]]:
    """`make_worker` of a VerifierPool with child processes; `limits` are the keywords of AdapterProcess."""

    async def make_worker(adapter: str) -> AdapterProcess:
        worker = AdapterProcess(source, adapter, options, **limits)
        await worker.start()
        return worker

    return make_worker


def _fields(answer: dict[str, Any]) -> dict[str, Any]:
    """The fields of an AdapterResult that the reward decides on."""
    steps = tuple((token, reward) for token, reward in answer["steps"])
    return answer | {"status": RewardStatus(answer["status"]), "steps": steps}
