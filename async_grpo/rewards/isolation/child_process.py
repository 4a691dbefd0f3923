"""The parent's end of a reward's process: ask it several things at a time, keep their time, end it."""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from async_grpo.errors import WorkerLost
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.isolation.framing import Frames, encode, frame
from async_grpo.rewards.isolation.spawn import SpawnedChild
from async_grpo.rewards.verifier_worker import CallInterrupted, ProcessDied

EXIT_WAIT_S = 0.5  # for a process that closed its channel to end by itself
GREETING = 0  # number of the first exchange


class Request:
    """A message to the process. `reply`: its answer, a dict; or TimeoutError, ProcessDied or CallInterrupted."""

    def __init__(self, number: int, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.number, self.timeout_s = number, timeout_s
        self.reply: asyncio.Future[dict[str, Any]] = loop.create_future()  # the caller may give it up
        self.answered: asyncio.Future[None] = loop.create_future()  # the process is done with it
        self.together: Sequence[Request] = ()  # it and those that the same call serves, once it is begun
        self.timer: asyncio.TimerHandle | None = None

    def settle(self, answer: dict[str, Any] | Exception) -> None:
        """Tell the caller, if it still waits."""
        if self.reply.done():
            return
        if isinstance(answer, Exception):
            self.reply.set_exception(answer)
            self.reply.exception()  # a caller that still waits gets it all the same; none need wait
        else:
            self.reply.set_result(answer)

    def close(self) -> None:
        """The process is done with it."""
        self.stop_timer()
        if not self.answered.done():
            self.answered.set_result(None)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class ChildProcess(asyncio.Protocol):
    """A process that answers each request once (see `child`).

    It serves what it gets in order, one at a time; an async reward, all at once; a batched one says which requests it
    begins together. Their time runs from then on.
    """

    def __init__(
        self, adapter: str, max_message_bytes: int, max_processes: int, environment: Mapping[str, str]
    ) -> None:
        self.ready = False  # it has said what it is
        self.lost = False  # it will answer nothing any more
        self.traits = AdapterTraits()  # until it has said what it is
        self._adapter = adapter
        self._frames = Frames(max_message_bytes)
        self._next_number = GREETING
        self._requests: dict[int, Request] = {}  # not answered yet, in their order
        self._nonsense = ""
        self._transport: asyncio.Transport | None = None
        self._burial: asyncio.Task[None] | None = None  # finds out what it died of
        self._ending: asyncio.Task[None] | None = None
        self._process = SpawnedChild(adapter, max_processes, environment)

    @property
    def pid(self) -> int:
        """Of the guardian (see `process_tree`): all others end with it."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether nothing is asked of it."""
        return not self._requests

    async def greet(self, greeting: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Open the channel with a first message; returns the answer. Raises ProcessDied, also after the time-out."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self, sock=self._process.channel)
        request = self._send(encode(greeting, sys.maxsize), timeout_s)
        self._begin([request])
        try:
            message = await request.reply
        except TimeoutError:
            error = f"the process of {self._adapter!r} was not ready within {timeout_s:g} s"
            raise ProcessDied(error) from None
        if "traits" in message:
            self.traits = AdapterTraits(**message["traits"])
            self.ready = True
        return message

    def ask(self, what: str, bodies: Sequence[bytes], timeout_s: float) -> Request:
        """Send `samples` or a `group`, each of them as JSON."""
        head = b'{"id":%d,"at":%.6f,"%b":[' % (self._next_number, time.monotonic(), what.encode())
        request = self._send(frame(head + b",".join(bodies) + b"]}"), timeout_s)
        if self.traits.is_async and not self.traits.is_batch:
            self._begin([request])
        else:
            self._begin_next()
        return request

    async def abandon(self, request: Request, grace_s: float) -> None:
        """Free the process of a request that its caller has given up; nothing if it was answered.

        One that is ahead of its turn is withdrawn. One that is served is cancelled, if the reward is async; only if that
        does not let go of it within `grace_s`, or cannot be told, does it cost the process. A batch goes on while
        somebody waits for another sample of it.
        """
        if not request.together:
            self._withdraw(request)
            return
        served = [other for other in request.together if not other.answered.done()]
        if request.answered.done() or not all(other.reply.done() for other in served):
            return
        for other in served:
            other.stop_timer()
            if self.traits.is_async:
                self._withdraw(other)
        if self.traits.is_async:
            await asyncio.wait([other.answered for other in served], timeout=grace_s)
        if not all(other.answered.done() for other in served):
            await self.end(CallInterrupted(f"the process of {self._adapter!r} was ended for another sample"))

    async def dismiss(self, timeout_s: float) -> None:
        """Let the process end in order, if it does so in time; `end` must follow."""
        if self._transport is not None and not self.lost:
            self._transport.write_eof()
            await self._process.ends_within(timeout_s)

    async def end(self, error: WorkerLost) -> None:
        """Kill the process; the replies to come raise the error."""
        self._fail(error, error)
        await self._stop()
        if self._burial is not None:
            await asyncio.wait((self._burial,))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, in a Ray actor, is no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                if "begun" in message:
                    self._begin([self._requests[number] for number in message["begun"]])
                else:
                    request = self._requests.pop(message.get("id", GREETING))
                    request.settle(message)
                    request.close()
                    self._begin_next()
        except (ValueError, TypeError, LookupError) as error:
            self._nonsense = f"{type(error).__name__}: {error}"  # somebody else writes into the channel
            assert self._transport is not None, "data comes from it"
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost:
            self.lost = True
            self._burial = asyncio.get_running_loop().create_task(self._bury())

    def _send(self, message: bytes, timeout_s: float) -> Request:
        request = Request(self._next_number, timeout_s)
        self._next_number += 1
        self._requests[request.number] = request
        if self._transport is not None and not self.lost:
            self._transport.write(message)
        return request

    def _withdraw(self, request: Request) -> None:
        if self._transport is not None and not self.lost:
            self._transport.write(encode({"cancel": request.number}, sys.maxsize))

    def _begin_next(self) -> None:
        """The first request is being served, where they are served in order."""
        if not (self.traits.is_async or self.traits.is_batch):
            first = next(iter(self._requests.values()), None)
            if first is not None and not first.together:
                self._begin([first])

    def _begin(self, requests: Sequence[Request]) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            request.together = requests
            request.timer = loop.call_later(request.timeout_s, self._expire, request)

    def _expire(self, request: Request) -> None:
        """Its time is over, and that of all that the same call serves. Their callers then abandon them."""
        waited_for = [other for other in request.together if not other.reply.done()]
        for other in request.together:
            other.stop_timer()
            other.settle(TimeoutError())
        if not waited_for:  # it was withdrawn as its turn came: no caller is there to end it
            error = CallInterrupted(f"the process of {self._adapter!r} was ended for another sample")
            self._ending = asyncio.get_running_loop().create_task(self.end(error))

    async def _bury(self) -> None:
        error: WorkerLost
        try:
            if not self._nonsense:
                await self._process.ends_within(
                    EXIT_WAIT_S
                )  # a kill while it ends would hide what it died of
            await self._stop()
            how = f"answered nonsense: {self._nonsense}" if self._nonsense else self._process.describe_exit()
            error = ProcessDied(f"the process of {self._adapter!r} {how}")
        except WorkerLost as survived:
            error = survived
        self._fail(error, CallInterrupted(f"{error}, before it began this sample"))

    def _fail(self, error: WorkerLost, before_its_turn: WorkerLost) -> None:
        self.lost = True
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.settle(error if request.together else before_its_turn)
            request.close()

    async def _stop(self) -> None:
        """Close the channel, kill and collect the process. Harmless when repeated."""
        if self._transport is None:
            self._process.channel.close()
        else:
            self._transport.abort()
        await self._process.collect()
