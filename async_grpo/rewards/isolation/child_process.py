"""The parent's side of a reward's process: starts it, sends requests to it, enforces their time limits, and ends it."""

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
from async_grpo.rewards.isolation.lines import CHANNEL_CLOSED, Lines, encode_line
from async_grpo.rewards.verifier_worker import CallInterrupted, ProcessDied

EXIT_WAIT_S = 0.5  # time for a process that closed its channel to end by itself
REAP_S = 10.0  # time for a killed process to end
POLL_INTERVAL_S = 0.002  # seconds between two checks whether the process has ended
EXIT_READ_BYTES = 2**16  # size of one read of the last answers from a process that has ended
_MAIN = "import sys; from async_grpo.rewards.isolation.child import main; main(*map(int, sys.argv[1:]))"


class ChildRequest:
    """A request to the process. Its reply or error is set even if the caller no longer waits.

    Args:
        number: Number that identifies the request in the process.
        timeout_s: Time limit in seconds, from when the process begins to serve the request.
        limit: The time-out object of the caller. Its deadline is set when the process begins to serve the request.
    """

    def __init__(self, number: int, timeout_s: float, limit: asyncio.Timeout) -> None:
        self.number = number
        self.timeout_s = timeout_s
        self.limit = limit
        self.reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        # All requests that are served by the same call as this one, including this one. Empty until the call begins
        self.batch: Sequence[ChildRequest] = ()
        self.is_given_up = False  # whether its caller no longer waits

    @property
    def has_begun(self) -> bool:
        """Return whether the process has begun to serve the request."""
        return len(self.batch) > 0


STDERR = 2  # descriptor of this program's stderr


class ChildProcess(asyncio.Protocol):
    """A process that answers each request once (see `child`). Connect its `channel` before the first request.

    A plain reward serves its requests in order, one at a time. An async reward serves all requests at the same time. A
    batched reward reports which requests it begins together. The time limit of a request starts when the process begins
    to serve it. The process dies with the thread that created it.

    Args:
        adapter: Name of the reward, for messages.
        max_message_bytes: Size limit of a message from the process.
        max_processes: Maximum number of processes, including this one and those that the reward starts.
        environment: The complete environment of the process.
        output_fd: Descriptor that the process's output is written to. By default this program's stderr, because the
            output must not mix with the program's own.
    """

    def __init__(
        self,
        adapter: str,
        max_message_bytes: int,
        max_processes: int,
        environment: Mapping[str, str],
        output_fd: int = STDERR,
    ) -> None:
        self.is_lost = False  # the process will send no more answers
        self.traits = AdapterTraits()  # set by the owner when the greeting has been answered
        self._adapter = adapter
        self._lines = Lines(max_message_bytes)
        self._numbers = itertools.count()
        self._requests: dict[int, ChildRequest] = {}  # unanswered requests, in the order of sending
        self._transport: asyncio.Transport | None = None
        self._bury_task: asyncio.Task[None] | None = None
        self._gone = asyncio.Event()  # set when the process and all that it started have ended
        self._max_processes = max_processes
        self.channel, child_end = socket.socketpair()
        arguments = [str(child_end.fileno()), str(os.getpid()), str(max_processes)]
        try:
            with child_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output_fd,
                    stderr=output_fd,
                    pass_fds=(child_end.fileno(),),
                    start_new_session=True,  # Ctrl-C in the terminal must not reach the process
                    env=environment,
                )
        except BaseException:
            self.channel.close()
            raise
        # Id of the guardian process (see `process_tree`). When it ends, the reward's processes end too
        self.pid = self._process.pid

    async def ask(self, kind: str, body: bytes, timeout_s: float, grace_s: float) -> dict[str, Any]:
        """Send a request and return the reply to it.

        Args:
            kind: Kind of the request: `greeting`, `sample` or `group`. The first request must be the greeting.
            body: Content of the request as JSON.
            timeout_s: Time limit in seconds, from when the process begins to serve the request.
            grace_s: See `AdapterProcess`.

        Raises:
            TimeoutError: The process did not answer in time.
            ProcessDied: The process died while it served the request.
            CallInterrupted: The process was ended because of another request, or died before it began this one.
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
        """End the process. Its unanswered requests raise the error. An idle process gets `grace_s` to end by itself."""
        if self._transport is not None and not self.is_lost and not self._requests:
            self._transport.write_eof()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), grace_s)
        self._kill(error)
        await self._gone.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport. asyncio calls this method."""
        # The type is cast, because Ray actors use uvloop, whose transport is not a subclass of asyncio's
        self._transport = cast(asyncio.Transport, transport)
        if self.is_lost:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read messages from the process. asyncio calls this method."""
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
        """Wait in a task for the end of the process, after its channel was closed. asyncio calls this method."""
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
        """Start the time limit of the oldest unanswered request, if the process serves requests one by one."""
        if self.traits.is_async or self.traits.is_batch:
            return
        first = next(iter(self._requests.values()), None)
        if first is not None and not first.has_begun:
            self._begin([first])

    def _begin(self, requests: Sequence[ChildRequest]) -> None:
        """Start the time limits of requests that one call of the reward serves together."""
        loop = asyncio.get_running_loop()
        for request in requests:
            request.batch = requests
            if not request.is_given_up and not request.reply.done():
                request.limit.reschedule(loop.time() + request.timeout_s)
        if all(request.is_given_up for request in requests):
            # All callers have given up, so none of them enforces the time limit. A timer does it instead
            loop.call_later(requests[0].timeout_s, self._interrupt, requests)

    def _interrupt(self, requests: Sequence[ChildRequest]) -> None:
        """End the process, unless it has answered all of these requests."""
        if not all(request.reply.done() for request in requests):
            self._kill(CallInterrupted(f"the process of {self._adapter!r} was ended for another sample"))

    async def _abandon(self, request: ChildRequest, grace_s: float) -> None:
        """Stop the work on a request whose caller no longer waits.

        A request that has not begun is withdrawn. A batch continues while a caller waits for another sample in it.
        Otherwise, the call of an async reward is cancelled and gets `grace_s` to end. If it does not end, or if the
        reward is not async, the process is ended.
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
        """Wait `wait_s` for the process to end by itself. Then kill it and its descendants, and fail its requests."""
        await self._ends_within(wait_s)
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)  # resumes the guardian, which the reward may have stopped
        if not await self._ends_within(REAP_S):
            self._process.kill()  # kills a guardian that does not respond; the reward's process dies with it
        error = ProcessDied(f"the process of {self._adapter!r} {self._cause_of_death()}")
        self._kill(error, CallInterrupted(f"{error}, before it began this sample"))
        self._gone.set()

    def _cause_of_death(self) -> str:
        exit_code = self._process.poll()
        if exit_code is None:
            return f"survives SIGKILL for {REAP_S:g} s"
        if exit_code == TOO_MANY:
            return f"was ended, for it had started more than {self._max_processes} processes"
        if exit_code == CHANNEL_CLOSED:
            return "died: the reward closed file descriptors that it had not opened (os.close, os.closerange)"
        if exit_code < 0:
            return f"died (signal {signal.Signals(-exit_code).name})"
        return f"died (exit status {exit_code})"

    def _kill(self, error: WorkerLost, error_before_turn: WorkerLost | None = None) -> None:
        """Close the connection, which ends the process, and set an error for all unanswered requests.

        Args:
            error: Error for the requests.
            error_before_turn: Error for the requests that have not begun. None uses `error`.
        """
        self.is_lost = True
        requests = list(self._requests.values())
        self._requests = {}
        for request in requests:
            request.reply.set_exception(error if request.has_begun else error_before_turn or error)
            # Mark the error as retrieved, because asyncio would log it if no caller waits
            request.reply.exception()
        if self._transport is not None:
            self._transport.abort()

    async def _ends_within(self, timeout_s: float) -> bool:
        """Return whether the process ends in time. It is polled, because waiting for it would need a thread."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_INTERVAL_S)
        return True
