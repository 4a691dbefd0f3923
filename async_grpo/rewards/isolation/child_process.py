"""The parent's end of a reward's process: start it, ask it several things at a time, keep their time, end it."""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from async_grpo.errors import WorkerLost
from async_grpo.processes.process_tree import TOO_MANY
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.isolation.lines import Lines, encode_line
from async_grpo.rewards.verifier_worker import CallInterrupted, ProcessDied

EXIT_WAIT_S = 0.5  # for a process that closed its channel to end by itself
REAP_S = 10.0  # for a killed process to end
_MAIN = "import sys; from async_grpo.rewards.isolation.child import main; main(*map(int, sys.argv[1:]))"


class ChildRequest:
    """A message to the process. Its reply comes, or is an error, whether or not its caller still waits."""

    def __init__(self, number: int, timeout_s: float, limit: asyncio.Timeout) -> None:
        self.number, self.timeout_s, self.limit = number, timeout_s, limit
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.together: Sequence[ChildRequest] = ()  # it and those that the same call serves, once it is begun
        self.given_up = False  # by its caller


class ChildProcess(asyncio.Protocol):
    """A process that answers each request once (see `child`). Arguments are those of `AdapterProcess`, but for the
    environment, which is all of its variables. Its `channel` must be connected first.

    It serves what it gets in order, one at a time; an async reward, all at once; a batched one says which requests it
    begins together. Their time runs from then on. It dies with the thread that made it.
    """

    def __init__(
        self, adapter: str, max_message_bytes: int, max_processes: int, environment: Mapping[str, str]
    ) -> None:
        self.lost = False  # it will answer nothing any more
        self.traits = AdapterTraits()  # until it has said what it is
        self._adapter = adapter
        self._lines = Lines(max_message_bytes)
        self._numbers = itertools.count()
        self._requests: dict[int, ChildRequest] = {}  # not answered yet, in their order
        self._transport: asyncio.Transport | None = None
        self._burial: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # it was collected, and all that it started
        self._max_processes = max_processes
        self.channel, theirs = socket.socketpair()
        arguments = [theirs.fileno(), os.getpid(), max_processes]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a reward prints must not land among the program's own output
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # deaf to the terminal's Ctrl-C
                    env=environment,
                )
        except BaseException:
            self.channel.close()
            raise
        self.pid = self._process.pid  # of the guardian (see `process_tree`): all others end with it

    async def ask(self, what: str, body: bytes, timeout_s: float, grace_s: float) -> dict[str, Any]:
        """The reply to the `greeting`, which comes first, a `sample` or a `group`, given as JSON.

        Raises TimeoutError `timeout_s` after it was begun, ProcessDied or CallInterrupted; `grace_s`: see `AdapterProcess`.
        """
        number = next(self._numbers)
        head = b'{"id":%d,"at":%.6f,"%b":' % (number, time.monotonic(), what.encode())
        try:
            async with asyncio.timeout(None) as limit:
                request = self._requests[number] = ChildRequest(number, timeout_s, limit)
                self._write(head + body + b"}")
                if self.traits.is_async and not self.traits.is_batch:
                    self._begin([request])
                else:
                    self._begin_next()
                return await asyncio.shield(request.reply)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not request.reply.done():
                request.given_up = True
                until = limit.when()  # of what has begun
                if self.traits.finishes and until and not isinstance(error, TimeoutError):
                    asyncio.get_running_loop().call_at(until, self._interrupt, [request])
                else:
                    await self._abandon(request, grace_s)
            raise

    async def end(self, error: WorkerLost, grace_s: float = 0.0) -> None:
        """End the process; the replies to come raise the error. If nothing is asked of it, it may first end in order."""
        if self._transport is not None and not self.lost and not self._requests:
            self._transport.write_eof()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), grace_s)
        self._kill(error)
        await self._gone.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's, in a Ray actor, is no subclass of it
        if self.lost:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._lines.feed(data):
                if "begun" in message:
                    self._begin([self._requests[number] for number in message["begun"]])
                else:
                    self._requests.pop(message["id"]).reply.set_result(message)
                    self._begin_next()
        except Exception as error:  # somebody else writes into the channel
            reason = f"the process of {self._adapter!r} answered nonsense: {type(error).__name__}: {error}"
            self._kill(ProcessDied(reason))

    def connection_lost(self, error: Exception | None) -> None:
        with contextlib.suppress(OSError):  # after an error in writing, its last answers may lie unread
            while error is not None and (data := self.channel.recv(2**16, socket.MSG_DONTWAIT)):
                self.data_received(data)
        wait_s = 0.0 if self.lost else EXIT_WAIT_S  # a kill while it ends would hide what it died of
        self.lost = True
        self._burial = asyncio.get_running_loop().create_task(self._bury(wait_s))

    def _write(self, message: bytes) -> None:
        if self._transport is not None and not self.lost:
            self._transport.write(message + b"\n")

    def _withdraw(self, request: ChildRequest) -> None:
        self._write(encode_line({"cancel": request.number}))

    def _begin_next(self) -> None:
        """The first request is being served, where they are served in order."""
        if not (self.traits.is_async or self.traits.is_batch):
            first = next(iter(self._requests.values()), None)
            if first is not None and not first.together:
                self._begin([first])

    def _begin(self, requests: Sequence[ChildRequest]) -> None:
        for request in requests:
            request.together = requests
            if not (request.given_up or request.reply.done()):
                request.limit.reschedule(asyncio.get_running_loop().time() + request.timeout_s)
        if all(request.given_up for request in requests):  # withdrawn too late: no caller keeps their time
            asyncio.get_running_loop().call_later(requests[0].timeout_s, self._interrupt, requests)

    def _interrupt(self, requests: Sequence[ChildRequest]) -> None:
        """End the process, unless it has let go of these."""
        if not all(request.reply.done() for request in requests):
            self._kill(CallInterrupted(f"the process of {self._adapter!r} was ended for another sample"))

    async def _abandon(self, request: ChildRequest, grace_s: float) -> None:
        """One that is ahead of its turn is withdrawn. One that is served is cancelled, if the reward is async; only if that
        does not let go of it in time, or cannot be told, does it cost the process. A batch goes on while somebody waits
        for another sample of it."""
        if not request.together:
            self._withdraw(request)
            return
        served = [other for other in request.together if not other.reply.done()]
        if not served or not all(other.given_up for other in served):
            return
        if self.traits.is_async:
            for other in served:
                self._withdraw(other)
            await asyncio.wait([other.reply for other in served], timeout=grace_s)
        self._interrupt(served)
        if self.lost:
            await self._gone.wait()

    async def _bury(self, wait_s: float) -> None:
        """Kill and collect the process and all that it started, unless it ends by itself within so many seconds."""
        await self._ends_within(wait_s)
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # the reward may have stopped its guardian
        if not await self._ends_within(REAP_S):
            self._process.kill()  # whatever ails the guardian, the reward's process dies with it
        if (code := self._process.poll()) is None:
            cause = f"survives SIGKILL for {REAP_S:g} s"
        elif code == TOO_MANY:
            cause = f"was ended, for it had started more than {self._max_processes} processes"
        else:
            cause = f"died ({f'signal {signal.Signals(-code).name}' if code < 0 else f'exit status {code}'})"
        error = ProcessDied(f"the process of {self._adapter!r} {cause}")
        self._kill(error, CallInterrupted(f"{error}, before it began this sample"))
        self._gone.set()

    def _kill(self, error: WorkerLost, before_its_turn: WorkerLost | None = None) -> None:
        """The replies to come raise the error; the process ends with the connection."""
        self.lost = True
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.reply.set_exception(error if request.together else before_its_turn or error)
            request.reply.exception()  # a caller that still waits gets it all the same; none need wait
        if self._transport is not None:
            self._transport.abort()

    async def _ends_within(self, timeout_s: float) -> bool:
        """Whether the process ends in time. Polled: waiting would take a thread."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.002)
        return True
