"""Limits that aiohttp lacks, for the HTTP servers of this library.

aiohttp does not limit the number of connections, the time to send an answer that the client does not read, and the size
of its log. If a client connects and sends no complete request head, aiohttp closes the connection after
`keepalive_timeout`, by default an hour. This library's servers set it to `IDLE_S`.
"""

import asyncio
import json
import logging
import resource
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

IDLE_S = 75.0  # seconds until a connection without a complete request head is closed; nginx's default
ANSWER_WITHIN_S = 60.0  # seconds after which a connection is aborted if the client does not read the answer
MAX_CONNECTIONS = 512  # default maximum number of connections of a server
FIRST_PAUSE_S = 1.0  # minimum pause in seconds between two log lines of the same kind
LONGEST_PAUSE_S = 600.0
MAX_LOGGED_CHARACTERS = 300
UNLIMITED_FILES = 1 << 20  # used as the limit of open files if the system sets none
PACKAGE = str(Path(__file__).resolve().parents[1])
# Loggers to limit; asyncio logs an error whenever it cannot accept a connection
NOISY_LOGGERS = ("aiohttp.server", "asyncio")


class ConnectionGate:
    """A protocol factory for `loop.create_server`: aiohttp's server with a limit on the number of connections.

    If a new connection exceeds the limit, the connection that has had no request for the longest time is closed. If all
    connections are busy with requests, the new connection is answered with status 503.

    Args:
        server: `AppRunner.server`.
        max_connections: Maximum number of connections. It is at most half the number of files that the process may
            open.
    """

    def __init__(self, server: web.Server, max_connections: int = MAX_CONNECTIONS) -> None:
        self._server = server
        self.max_connections = min(max_connections, _max_files() // 2)
        self._busy: set[web.RequestHandler] = set()
        self._last_used: dict[web.RequestHandler, None] = {}  # open connections, least recently used first

    def __call__(self) -> asyncio.Protocol:
        self._note_connections()
        if len(self._last_used) < self.max_connections:
            return self._server()
        for handler in self._last_used:
            if not self._has_request(handler):
                handler.force_close()
                return self._server()
        return _Refusal(self.max_connections)

    def _note_connections(self) -> None:
        """Remove closed connections from `_last_used`, and append new ones in the order in which they were opened."""
        connected = {handler: None for handler in self._server.connections if handler.transport is not None}
        still_open = {handler: None for handler in self._last_used if handler in connected}
        self._last_used = still_open | connected

    def _has_request(self, handler: web.RequestHandler) -> bool:
        """Return whether a connection has an unanswered request. Only private fields of aiohttp show this."""
        is_answering = handler in self._busy or handler._current_request is not None
        return is_answering or bool(handler._messages)

    async def answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Answer a request with the handler's response. The connection counts as busy until the response is sent.

        Args:
            request: The request.
            handler: Function that returns the response.

        Returns:
            The response after it was sent. If the client did not read it in time, the connection is closed.
        """
        self._busy.add(request.protocol)
        try:
            response = await handler(request)
            async with sending_in_time(request):
                await response.prepare(request)
                await response.write_eof()
            return response
        finally:
            self._busy.discard(request.protocol)
            self._note_connections()
            if request.protocol in self._last_used:
                del self._last_used[request.protocol]
                self._last_used[request.protocol] = None  # moves the connection to the end of the order


@asynccontextmanager
async def sending_in_time(request: web.Request) -> AsyncIterator[None]:
    """Abort the connection if the block, which sends a response, takes longer than `ANSWER_WITHIN_S`."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            yield
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        # The client has closed the connection, which is no error. If its request sampled a turn, the turn is trained on
        pass


class _Refusal(asyncio.Protocol):
    """The protocol of a connection that exceeds the limit. It answers every request with status 503."""

    def __init__(self, max_connections: int) -> None:
        message = f"{max_connections} connections are open, and all are busy: try again, or use fewer at once"
        error = {"message": message, "type": "server_error", "code": "too_many_connections", "param": None}
        self._body = json.dumps({"error": error}).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        )
        # Do not check the class of `transport`: uvloop's transports are not subclasses of asyncio.WriteTransport
        transport.write(head.encode() + self._body)  # type: ignore[attr-defined]
        transport.close()


class OneLinePerFault(logging.Filter):
    """A log filter that drops repeated errors of the same kind. The pauses between the errors that it logs grow.

    An error that a client causes is logged as one line, and an error of the library with its traceback. Errors that
    clients cause are of the same kind if their message and class are the same. Errors of the library are of the same
    kind if they have the same class and are raised at the same line of code, whatever their message is. Otherwise a
    client that can cause an error with changing messages could fill the disk with tracebacks.
    """

    def __init__(self) -> None:
        super().__init__()
        # Kind -> (time after which the next error is logged, length of the pause after that, number of errors dropped
        # so far)
        self._next_at: dict[tuple[Any, ...], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. The record of an error that a client caused is changed to one line."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        is_from_client = _is_from_client(record, error)
        cause = record.msg if is_from_client else _place_of(error)
        kind = (record.name, cause, type(error))
        now = time.monotonic()
        next_at, pause_s, num_suppressed = self._next_at.get(kind, (now, FIRST_PAUSE_S, 0))
        if now < next_at:
            self._next_at[kind] = (next_at, pause_s, num_suppressed + 1)
            return False
        self._next_at[kind] = (now + pause_s, min(2 * pause_s, LONGEST_PAUSE_S), 0)
        suffix = f" ({num_suppressed} more like it before)" if num_suppressed else ""
        if is_from_client:
            first_line = record.getMessage().partition("\n")[0]
            text = f"{first_line}: {type(error).__name__}: {error}".encode("unicode_escape").decode()
            record.msg = text[:MAX_LOGGED_CHARACTERS] + suffix
            record.exc_info = None
            record.exc_text = None
        else:
            record.msg = record.getMessage() + suffix
        record.args = ()
        return True


def bound_logs() -> None:
    """Install `OneLinePerFault` on the loggers of this process's HTTP servers, unless it is installed already."""
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(entry, OneLinePerFault) for entry in logger.filters):
            logger.addFilter(OneLinePerFault())


def _is_from_client(record: logging.LogRecord, error: BaseException) -> bool:
    """Return whether a client caused the error: invalid HTTP, a broken connection, or too many connections (EMFILE)."""
    if record.name == "asyncio":
        return isinstance(error, OSError) and "socket.accept()" in str(record.msg)
    return isinstance(error, HttpProcessingError | ConnectionError)


def _place_of(error: BaseException) -> tuple[str, int]:
    """Return file and line of the innermost traceback frame in this package. If there is none, use the innermost frame."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return "", 0
    package_frames = [(file, line) for file, line in frames if file.startswith(PACKAGE)]
    return package_frames[-1] if package_frames else frames[-1]


def _max_files() -> int:
    """Return the number of files that this process may open."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED_FILES if soft_limit == resource.RLIM_INFINITY else soft_limit
