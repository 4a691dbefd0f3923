"""Bounds for our HTTP servers (aiohttp's): on the number of connections, on their silence, and on the log.

aiohttp closes a connection that has sent no whole head of a request for `keepalive_timeout` (`IDLE_S` here; its default
is an hour). It has no limit on the number of connections, on the time of an answer that nobody reads, or on what it logs.
"""

import asyncio
import json
import logging
import resource
import time
import traceback
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

IDLE_S = 75.0  # without a whole head of a request; as nginx
ANSWER_WITHIN_S = 60.0  # to write it, to a client that may not read
MAX_CONNECTIONS = 512  # unless the caller knows that there will be more
LONGEST_PAUSE_S = 600.0  # between two log lines of one kind
MAX_LOGGED_CHARACTERS = 300
PACKAGE = str(Path(__file__).resolve().parents[1])
NOISY_LOGGERS = ("aiohttp.server", "asyncio")  # the latter logs what accepting a connection fails of


class ConnectionGate:
    """A factory of protocols for `loop.create_server`: aiohttp's server, with at most so many connections.

    Where one more comes, the one that has waited longest without a request is closed: since its last answer, or since it
    was opened. If all are busy with requests, the new one is answered with status 503.

    Args:
        server: `AppRunner.server`.
        most: connections; at most half of the files that the process may open.
    """

    def __init__(self, server: web.Server, most: int = MAX_CONNECTIONS) -> None:
        self._server, self.most = server, min(most, _max_files() // 2)
        self._busy: set[web.RequestHandler] = set()
        self._last_used: dict[web.RequestHandler, None] = {}  # open connections, the longest unused first

    def __call__(self) -> asyncio.Protocol:
        self._note_connections()
        if len(self._last_used) < self.most:
            return self._server()
        for handler in self._last_used:
            if not self._has_request(handler):
                handler.force_close()
                return self._server()
        return _Refusal(self.most)

    def _note_connections(self) -> None:
        """Forget those that are closed, and put new ones last, in the order in which they were opened."""
        connected = {handler: None for handler in self._server.connections if handler.transport is not None}
        still_open = {handler: None for handler in self._last_used if handler in connected}
        self._last_used = still_open | connected

    def _has_request(self, handler: web.RequestHandler) -> bool:
        """Tell whether a request has arrived that is not answered yet. aiohttp says so in no public way."""
        is_answering = handler in self._busy or handler._current_request is not None
        return is_answering or bool(handler._messages)

    async def answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Have the handler answer; its connection counts as busy. One that does not read its answer in time is closed."""
        self._busy.add(request.protocol)
        try:
            response = await handler(request)
            await write_in_time(request, response)
            return response
        finally:
            self._busy.discard(request.protocol)
            self._note_connections()
            if request.protocol in self._last_used:
                del self._last_used[request.protocol]
                self._last_used[request.protocol] = None  # the last in the row


async def write_in_time(request: web.Request, response: web.StreamResponse) -> None:
    """Send the whole answer, or abort the connection after `ANSWER_WITHIN_S`."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client has gone: the turn was generated and is trained on although nobody reads the answer


class _Refusal(asyncio.Protocol):
    """Answer a connection that is one too many, whatever it asks."""

    def __init__(self, most: int) -> None:
        message = f"{most} connections are open, and all are busy: try again, or use fewer at once"
        error = {"message": message, "type": "server_error", "code": "too_many_connections", "param": None}
        self._body = json.dumps({"error": error}).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        )
        transport.write(head.encode() + self._body)  # type: ignore[attr-defined]  # uvloop's is no subclass
        transport.close()


class OneLinePerFault(logging.Filter):
    """Log faults of one kind with growing pauses: a client's as one line, our own with its traceback.

    Faults of clients are of one kind if message and class are the same, and our own if they arise in the same place: a
    client that has found such a place must not fill the disk with tracebacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next_at: dict[tuple[Any, ...], tuple[float, float, int]] = {}  # at, pause, suppressed since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged; a client's fault becomes a line."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        is_a_client_s = _is_a_client_s(record, error)
        cause = record.msg if is_a_client_s else _place_of(error)
        kind = record.name, cause, type(error)
        now = time.monotonic()
        next_at, pause_s, suppressed = self._next_at.get(kind, (now, 1.0, 0))
        if now < next_at:
            self._next_at[kind] = next_at, pause_s, suppressed + 1
            return False
        self._next_at[kind] = now + pause_s, min(2 * pause_s, LONGEST_PAUSE_S), 0
        more = f" ({suppressed} more like it before)" if suppressed else ""
        if not is_a_client_s:
            record.msg, record.args = record.getMessage() + more, ()
            return True
        first_line = record.getMessage().partition("\n")[0]
        described = f"{first_line}: {type(error).__name__}: {error}".encode("unicode_escape").decode()
        record.msg = described[:MAX_LOGGED_CHARACTERS] + more
        record.args, record.exc_info, record.exc_text = (), None, None
        return True


def bound_logs() -> None:
    """Have this process's HTTP servers log few faults, and a line for one of a client. Repeating it is harmless."""
    for name in NOISY_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(entry, OneLinePerFault) for entry in logger.filters):
            logger.addFilter(OneLinePerFault())


def _is_a_client_s(record: logging.LogRecord, error: BaseException) -> bool:
    """Tell whether clients cause it: bytes that are no HTTP, a connection that breaks, too many of them (EMFILE)."""
    if record.name == "asyncio":
        return isinstance(error, OSError) and "socket.accept()" in str(record.msg)
    return isinstance(error, HttpProcessingError | ConnectionError)


def _place_of(error: BaseException) -> tuple[str, int]:
    """Return file and line of the innermost call in this package that led to the error, or else of the innermost call."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return "", 0
    inside = [frame for frame in frames if frame[0].startswith(PACKAGE)]
    return (inside or frames)[-1]


def _max_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
