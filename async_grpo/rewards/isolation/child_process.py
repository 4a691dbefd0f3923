"""The parent's end of a reward's process: start it, send it requests, keep their time limits, and end it."""

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

EXIT_WAIT_S = 0.5  # time for a process that closed its channel to end by itself
REAP_S = 10.0  # time for a killed process to end
POLL_INTERVAL_S = 0.002  # between two looks whether the process has ended
EXIT_READ_BYTES = 2**16  # per read of the last answers of a process that has ended
_MAIN = "import sys; from async_grpo.rewards.isolation.child import main; main(*map(int, sys.argv[1:]))"


class ChildRequest:
    """A message to the process. Its reply or error is set even if the caller no longer waits.

    Args:
        number: Number of the request in the process.
        timeout_s: Time limit, from when the process begins to serve the request.
        limit: The caller's time-out, which is set when the process begins.
    """

    def __init__(self, number: int, timeout_s: float, limit: asyncio.Timeout) -> None:
        self.number = number
        self.timeout_s = timeout_s
        self.limit = limit
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.batch: Sequence[
            ChildRequest
        ] = ()  # the requests of the call that serves this one, once it has begun
        self.is_given_up = False  # by its caller

    @property
    def has_begun(self) -> bool:
        """Return whether the process has begun to serve the request."""
        return len(self.batch) > 0


class ChildProcess(asyncio.Protocol):
    """A process that answers each request once (see `child`). Its `channel` must be connected before the first request.

    A plain reward serves its requests in order, one at a time; an async reward serves all at once; a batched reward reports
    which requests it begins together. A request's time limit starts when it begins. The process dies with the thread that
    made it.

    Args:
        adapter: Name of the reward, for messages.
        max_message_bytes: Size limit of a message from the process.
        max_processes: Number of processes that the reward may have, this one included.
        environment: All environment variables of the process.
    """

    def __init__(
        self, adapter: str, max_message_bytes: int, max_processes: int, environment: Mapping[str, str]
    ) -> None:
        self.is_lost = False  # it will answer nothing any more
        self.traits = AdapterTraits()  # set by the owner when the greeting has been answered
        self._adapter = adapter
        self._lines = Lines(max_message_bytes)
        self._numbers = itertools.count()
        self._requests: dict[int, ChildRequest] = {}  # not answered yet, in their order
        self._transport: asyncio.Transport | None = None
        self._bury_task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # the process and all that it started have ended
        self._max_processes = max_processes
        self.channel, child_end = socket.socketpair()
        arguments = [str(child_end.fileno()), str(os.getpid()), str(max_processes)]
        try:
            with child_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # what a reward prints must not mix with the program's own output
                    pass_fds=(child_end.fileno(),),
                    start_new_session=True,  # the terminal's Ctrl-C must not reach it
                    env=environment,
                )
        except BaseException:
            self.channel.close()
            raise
        self.pid = self._process.pid  # of the guardian (see `process_tree`), with which all others end

    async def ask(self, kind: str, body: bytes, timeout_s: float, grace_s: float) -> dict[str, Any]:
        """Return the reply to a request.

        Args:
            kind: Kind of the request: `greeting`, which must be the first, `sample` or `group`.
            body: Content of the request as JSON.
            timeout_s: Time limit, from when the process begins to serve the request.
            grace_s: See `AdapterProcess`.

        Raises:
            TimeoutError: The process did not answer in time.
            ProcessDied: The process died while it served the request.
            CallInterrupted: The process was ended for another request.
        """
        number = next(self._numbers)
        head = b'{"id":%d,"at":%.6f,"%b":' % (number, time.monotonic(), kind.encode())
        try:
            async with asyncio.timeout(None) as limit:
                request = ChildRequest(number, timeout_s, limit)
                self._requests[number] = request
                self._write(head + body + b"}")
                if self.traits.is_async and not self.traits.is_batch:
                    self._begin([request])
                else:
                    self._begin_next()
                return await asyncio.shield(request.reply)
        except (TimeoutError, asyncio.CancelledError) as error:
            if not request.reply.done():
                request.is_given_up = True
                ends_at = limit.when()  # None if the request has not begun
                is_cancelled = not isinstance(error, TimeoutError)
                if self.traits.finishes and ends_at and is_cancelled:
                    asyncio.get_running_loop().call_at(ends_at, self._interrupt, [request])
                else:
                    await self._abandon(request, grace_s)
            raise

    async def end(self, error: WorkerLost, grace_s: float = 0.0) -> None:
        """End the process; its unanswered requests raise the error. An idle process may use `grace_s` to end by itself."""
        if self._transport is not None and not self.is_lost and not self._requests:
            self._transport.write_eof()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), grace_s)
        self._kill(error)
        await self._gone.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; asyncio calls this."""
        # A cast, because uvloop's transport, in a Ray actor, is no subclass of asyncio's
        self._transport = cast(asyncio.Transport, transport)
        if self.is_lost:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read messages of the process; asyncio calls this."""
        try:
            for message in self._lines.feed(data):
                if "begun" in message:
                    self._begin([self._requests[number] for number in message["begun"]])
                else:
                    self._requests.pop(message["id"]).reply.set_result(message)
                    self._begin_next()
        except Exception as error:  # the reward may have written into the channel
            reason = f"the process of {self._adapter!r} answered nonsense: {type(error).__name__}: {error}"
            self._kill(ProcessDied(reason))

    def connection_lost(self, error: Exception | None) -> None:
        """Collect the process; asyncio calls this."""
        if error is not None:
            self._read_last_answers()
        # Killing a process that is about to end would hide the cause of its death
        wait_s = 0.0 if self.is_lost else EXIT_WAIT_S
        self.is_lost = True
        self._bury_task = asyncio.get_running_loop().create_task(self._bury(wait_s))

    def _read_last_answers(self) -> None:
        """Read the answers that asyncio leaves unread when writing fails."""
        with contextlib.suppress(OSError):
            data = self.channel.recv(EXIT_READ_BYTES, socket.MSG_DONTWAIT)
            while data:
                self.data_received(data)
                data = self.channel.recv(EXIT_READ_BYTES, socket.MSG_DONTWAIT)

    def _write(self, message: bytes) -> None:
        if self._transport is not None and not self.is_lost:
            self._transport.write(message + b"\n")

    def _withdraw(self, request: ChildRequest) -> None:
        self._write(encode_line({"cancel": request.number}))

    def _begin_next(self) -> None:
        """Start the time of the first request, if the process serves requests in order."""
        if self.traits.is_async or self.traits.is_batch:
            return
        first = next(iter(self._requests.values()), None)
        if first is not None and not first.has_begun:
            self._begin([first])

    def _begin(self, requests: Sequence[ChildRequest]) -> None:
        """Start the time of requests that one call of the reward serves."""
        loop = asyncio.get_running_loop()
        for request in requests:
            request.batch = requests
            if not request.is_given_up and not request.reply.done():
                request.limit.reschedule(loop.time() + request.timeout_s)
        if all(request.is_given_up for request in requests):
            # Cancelled after it had started: no caller enforces its time limit any more
            loop.call_later(requests[0].timeout_s, self._interrupt, requests)

    def _interrupt(self, requests: Sequence[ChildRequest]) -> None:
        """End the process, unless it has answered all of these requests."""
        if not all(request.reply.done() for request in requests):
            self._kill(CallInterrupted(f"the process of {self._adapter!r} was ended for another sample"))

    async def _abandon(self, request: ChildRequest, grace_s: float) -> None:
        """Free the process from a request that its caller has given up.

        A request that has not begun is withdrawn. A batch goes on while a caller waits for another sample of it. Otherwise
        an async reward gets a cancellation and `grace_s` to obey it; a reward that does not obey, or that cannot be
        cancelled, loses its process.
        """
        if not request.has_begun:
            self._withdraw(request)
            return
        unanswered = [
            waiting_request for waiting_request in request.batch if not waiting_request.reply.done()
        ]
        if not unanswered or not all(waiting_request.is_given_up for waiting_request in unanswered):
            return
        if self.traits.is_async:
            for waiting_request in unanswered:
                self._withdraw(waiting_request)
            await asyncio.wait([waiting_request.reply for waiting_request in unanswered], timeout=grace_s)
        self._interrupt(unanswered)
        if self.is_lost:
            await self._gone.wait()

    async def _bury(self, wait_s: float) -> None:
        """Kill and collect the process and all that it started, unless it ends by itself within `wait_s`."""
        await self._ends_within(wait_s)
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # the reward may have stopped its guardian
        if not await self._ends_within(REAP_S):
            self._process.kill()  # whatever blocks the guardian, the reward's process dies with it
        error = ProcessDied(f"the process of {self._adapter!r} {self._cause_of_death()}")
        self._kill(error, CallInterrupted(f"{error}, before it began this sample"))
        self._gone.set()

    def _cause_of_death(self) -> str:
        exit_code = self._process.poll()
        if exit_code is None:
            return f"survives SIGKILL for {REAP_S:g} s"
        if exit_code == TOO_MANY:
            return f"was ended, for it had started more than {self._max_processes} processes"
        if exit_code < 0:
            return f"died (signal {signal.Signals(-exit_code).name})"
        return f"died (exit status {exit_code})"

    def _kill(self, error: WorkerLost, error_before_turn: WorkerLost | None = None) -> None:
        """Close the connection, with which the process ends, and set the error of all unanswered requests.

        Args:
            error: Error of all requests.
            error_before_turn: Error of the requests that have not begun, if it is another one.
        """
        self.is_lost = True
        requests = list(self._requests.values())
        self._requests = {}
        for request in requests:
            request.reply.set_exception(error if request.has_begun else error_before_turn or error)
            # Marks the error as retrieved: the caller may have gone, and asyncio would log it
            request.reply.exception()
        if self._transport is not None:
            self._transport.abort()

    async def _ends_within(self, timeout_s: float) -> bool:
        """Return whether the process ends in time. It is polled, because waiting for it would take a thread."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_INTERVAL_S)
        return True
