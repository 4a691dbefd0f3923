"""One reward in a killable process: deadlines are kept by SIGKILL, and a crash is tried once more."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.batches import Batches
from async_grpo.rewards.channel import ChildProcess, ProcessDied, Reply
from async_grpo.rewards.contract import failure
from async_grpo.rewards.framing import dumps
from async_grpo.rewards.kinds import Kind
from async_grpo.rewards.source import RewardSource
from async_grpo.types import AdapterResult, RewardStatus

ATTEMPTS = 2  # processes that a sample may crash before it has failed
IN_PIPE = 2  # samples sent to a process that serves one at a time: the one it works on, and the next
CLOSE_S = 2.0  # for the `close` of a reward

Answers = list[dict[str, Any]]


class AdapterProcess:
    """A verifier worker (see `worker.VerifierWorker`) that runs one reward in a child process.

        worker = AdapterProcess(RewardSource.from_file("reward_registry.py"), "countdown")
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
        source: RewardSource,
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
        self.kind = Kind()  # until the process has said what it is
        self._start_timeout_s, self._grace_s = start_timeout_s, grace_s
        self._max_message_bytes, self._max_processes = max_message_bytes, max_processes
        self._greeting = {
            "source": asdict(source),
            "adapter": adapter,
            "options": dict(options or {}),
            "memory_limit_bytes": memory_limit_bytes,
            "max_message_bytes": max_message_bytes,
        }
        self._child: ChildProcess | None = None
        self._closed = self._closes = False
        self._starting, self._gathering = asyncio.Lock(), asyncio.Lock()
        self._turn = asyncio.Lock()  # of a process that serves one request after the other
        self._num_places, self._places = 1, asyncio.Semaphore(1)
        self._last: Reply | None = (
            None  # of the sample that was sent last to a process that serves one at a time
        )
        self._batches: Batches | None = None

    @property
    def capacity(self) -> int:
        """How many calls are served at a time; known once the process has been started."""
        return self.kind.capacity

    @property
    def takes_ahead(self) -> bool:
        """Whether more calls than that may be made, to be served next; their time starts when it is their turn."""
        return not (self.kind.is_async or self.kind.is_batch)

    @property
    def pid(self) -> int | None:
        """Of the process that leads the others, None while there is none."""
        return self._child.pid if self._child and not self._child.lost else None

    async def start(self) -> None:
        """Start the process now, so that no sample waits for it.

        Raises:
            ConfigurationError: the page or the reward in it cannot be used.
            WorkerLost: the process died or was not ready in time.
        """
        async with self._starting:
            if self._closed:
                raise WorkerLost(f"the worker of {self.adapter!r} is closed")
            if self._child is None or self._child.lost:
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
        self._closed = True
        if self._child is not None:
            if self._closes and self._child.idle:
                await self._child.dismiss(CLOSE_S)
            await self._child.end(f"the worker of {self.adapter!r} is closed")

    async def _tried(self, what: str, items: list[dict[str, Any]], timeout_s: float) -> tuple[Answers, int]:
        """The answers to the items, and the attempts that it took."""
        if self._child is None:  # the first start tells the kind; if it fails, the attempts below say why
            with contextlib.suppress(ConfigurationError, WorkerLost):
                await self.start()
        try:
            bodies = [dumps(item, self._max_message_bytes) for item in items]
        except (TypeError, ValueError) as error:
            return [failure(f"the sample cannot be sent: {error}") for _ in items], 1
        attempt = self._tried_in_line if self.takes_ahead else self._tried_among_others
        try:
            return await attempt(what, bodies, timeout_s)
        except _Failed as failed:
            return [failure(failed.reason, failed.status.value) for _ in items], failed.attempts

    async def _tried_in_line(self, what: str, bodies: list[bytes], timeout_s: float) -> tuple[Answers, int]:
        """For a process that serves one request after the other: it is known which one it died of."""
        attempts, left_s, reason = 0, timeout_s, ""
        while attempts < ATTEMPTS:
            async with self._places:
                try:
                    await self.start()
                except ConfigurationError as error:
                    raise _Failed(str(error), attempts + 1) from error
                except ProcessDied as error:
                    attempts, reason = attempts + 1, str(error)
                    continue
                child, before = self._child, self._last
                assert child is not None
                request_id, reply = child.ask(what, bodies)
                self._last, begun_at = reply, math.inf
                try:
                    if before is not None:
                        await asyncio.wait((before,))
                    begun_at = time.monotonic()
                    return await _in_time(reply, begun_at + left_s), attempts + 1
                except TimeoutError as error:
                    raise _Failed(
                        f"no answer within {timeout_s:g} s", attempts + 1, RewardStatus.TIMED_OUT
                    ) from error
                except WorkerLost as error:
                    if self._closed:
                        raise
                    if isinstance(error, ProcessDied) and _was_answered(before):
                        attempts, reason = attempts + 1, str(error)
                        left_s -= time.monotonic() - begun_at
                finally:
                    if child.is_asked(request_id):  # timed out or cancelled
                        await self._abandon(child, request_id)
        raise _Failed(reason, attempts)

    async def _tried_among_others(
        self, what: str, bodies: list[bytes], timeout_s: float
    ) -> tuple[Answers, int]:
        """For a process that serves several at a time; the time starts with the first attempt."""
        attempts, deadline, reason = 0, math.inf, ""
        while attempts < ATTEMPTS:
            async with self._alone(deadline) if attempts else self._places:
                attempts += 1
                asked_at = time.monotonic()
                deadline = min(deadline, asked_at + timeout_s)
                try:
                    await self.start()
                    deadline += time.monotonic() - asked_at  # starting is on nobody's time
                    call = self._score if what == "samples" else self._post_process
                    return await call(bodies, deadline), attempts
                except TimeoutError as error:
                    if attempts > 1 and self.capacity > 1:  # another one's crash may have taken its time
                        raise self._no_time_left() from None
                    reason = f"no answer within {timeout_s:g} s"
                    raise _Failed(reason, attempts, RewardStatus.TIMED_OUT) from error
                except ConfigurationError as error:
                    raise _Failed(str(error), attempts) from error
                except ProcessDied as error:
                    if self._closed:
                        raise
                    reason = str(error)
        raise _Failed(reason, attempts)

    @contextlib.asynccontextmanager
    async def _alone(self, deadline: float) -> AsyncIterator[None]:
        """All places: nothing else is in flight meanwhile."""
        taken = 0
        try:
            try:
                async with asyncio.timeout(deadline - time.monotonic()), self._gathering:
                    while taken < self.capacity:
                        await self._places.acquire()
                        taken += 1
            except TimeoutError:
                raise self._no_time_left() from None
            yield
        finally:
            for _ in range(taken):
                self._places.release()

    def _no_time_left(self) -> WorkerLost:
        return WorkerLost(f"no time is left to try again after a crash of {self.adapter!r}")

    async def _score(self, bodies: list[bytes], deadline: float) -> Answers:
        if self._batches is not None:
            return [await self._batches.score(bodies[0], deadline - time.monotonic())]
        return await self._exchange("samples", bodies, deadline)

    async def _score_batch(self, bodies: list[bytes]) -> Answers:
        await self.start()  # it may have died since its samples were collected
        return await self._exchange("samples", bodies, math.inf)

    async def _post_process(self, bodies: list[bytes], deadline: float) -> Answers:
        if self.kind.is_async:
            return await self._exchange("group", bodies, deadline)
        async with self._turn:
            await self.start()
            return await self._exchange("group", bodies, deadline)

    async def _exchange(self, what: str, bodies: list[bytes], deadline: float) -> Answers:
        child = self._child
        assert child is not None, "`start` comes first"
        request_id, reply = child.ask(what, bodies)
        try:
            return await _in_time(reply, deadline)
        finally:
            if child.is_asked(request_id):  # timed out or cancelled
                await self._abandon(child, request_id)

    async def _abandon(self, child: ChildProcess, request_id: int) -> None:
        """Free the process of a request that nobody waits for."""
        try:
            if self.kind.is_async:
                await asyncio.wait((child.cancel(request_id),), timeout=self._grace_s)
        finally:
            if child.is_asked(request_id):
                child.forget(request_id)
                await child.end(f"the process of {self.adapter!r} was ended for another sample")

    async def _start_child(self) -> None:
        """Start the process, and learn from it what it is."""
        child = self._child = ChildProcess(self.adapter, self._max_message_bytes, self._max_processes)
        self._last = None
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
        self.kind = kind = Kind(**message["kind"])
        num_places = IN_PIPE if self.takes_ahead else kind.capacity
        for _ in range(num_places - self._num_places):
            self._places.release()
        self._num_places = num_places
        if kind.is_batch and self._batches is None:
            self._batches = Batches(kind, self._score_batch, self._turn)


class _Failed(Exception):
    """What becomes of items, and the attempts that were made."""

    def __init__(self, reason: str, attempts: int, status: RewardStatus = RewardStatus.FAILED) -> None:
        super().__init__(reason)
        self.reason, self.attempts, self.status = reason, attempts, status


async def _in_time(reply: Reply, deadline: float) -> Answers:
    """The answers of the reply. Raises TimeoutError after the deadline (inf for none), and what the reply raises."""
    timer = None
    if deadline < math.inf:
        timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), _expire, reply)
    try:
        answers: Answers = (await reply)["answers"]
        return answers
    finally:
        if timer is not None:
            timer.cancel()


def _was_answered(reply: Reply | None) -> bool:
    return reply is None or (reply.done() and not reply.cancelled() and reply.exception() is None)


def _expire(reply: Reply) -> None:
    if not reply.done():
        reply.set_exception(TimeoutError())
        reply.exception()  # who still waits gets it all the same; nobody need wait


def process_maker(
    source: RewardSource, options: Mapping[str, Any] | None = None, **limits: Any
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
