"""`HostileServer`: HTTP/1.1 on a raw socket, by script, in every way in which a judge can go wrong.

    async with HostileServer(status(500), reply({"score": 1})) as server:     # first this, then that for ever
        ... server.url, server.requests

A behaviour is `async def behave(request, connection)`. It answers, or does not; what it returns says whether the
connection goes on (anything true) or is closed.
"""

import asyncio
import contextlib
import gzip
import json
import socket
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass
class Request:
    """One request that was read to its end, and when."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float = field(default_factory=time.monotonic)

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """The writing half of one connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def reset(self) -> None:
        """Close with an RST instead of a FIN."""
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1" + 7 * b"\0"
        )
        self._writer.transport.abort()


Behaviour = Callable[[Request, Connection], Awaitable[Any]]


class HostileServer:
    """Serves on a free port of this machine.

    Args:
        behaviours: one per request, in the order in which they come; the last one goes on for ever.
    """

    def __init__(self, *behaviours: Behaviour) -> None:
        self._behaviours = behaviours
        self.requests: list[Request] = []
        self.running = self.most_running = self.connections = 0
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> "HostileServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.current_task())
        self.connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._answer(await read_request(reader), Connection(writer)):
                    pass
        finally:
            self._tasks.discard(asyncio.current_task())
            writer.close()

    async def _answer(self, request: Request, connection: Connection) -> Any:
        behave = self._behaviours[min(len(self.requests), len(self._behaviours) - 1)]
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await behave(request, connection)
        finally:
            self.running -= 1


async def read_request(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    pairs = [line.partition(":") for line in lines if line]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(first.split()[1], headers, body)


def message(code: int, body: bytes, **headers: str) -> bytes:
    """A whole reply; `headers` with _ for -; a `content_length` of one's own is kept."""
    fields = {"content_length": str(len(body)), "content_type": "application/json", **headers}
    lines = [f"HTTP/1.1 {code} Something", *(f"{k.replace('_', '-')}: {v}" for k, v in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def behaviour(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Behaviour]:
    """Of a function of the request, the connection and its own arguments: one of these arguments alone."""
    return lambda *given, **named: lambda request, connection: answer(request, connection, *given, **named)


# Honest behaviours


@behaviour
async def raw(request: Request, connection: Connection, data: bytes, then_close: bool = False) -> bool:
    """Send exactly this."""
    await connection.write(data)
    return not then_close


def reply(value: Any, code: int = 200, **headers: str) -> Behaviour:
    """A JSON reply."""
    return status(code, json.dumps(value).encode(), **headers)


def status(code: int, body: bytes = b'{"error": "as asked"}', **headers: str) -> Behaviour:
    return raw(message(code, body, **headers))


@behaviour
async def after(request: Request, connection: Connection, seconds: float, then: Behaviour) -> Any:
    """The same, later."""
    await asyncio.sleep(seconds)
    return await then(request, connection)


def gzipped(value: Any, **headers: str) -> Behaviour:
    return status(200, gzip.compress(json.dumps(value).encode()), content_encoding="gzip", **headers)


# Dishonest ones


@behaviour
async def truncated(request: Request, connection: Connection, then_reset: bool = False) -> bool:
    """Half of what was promised, then the end of the connection, by a FIN or by an RST."""
    await connection.write(message(200, b'{"scor', content_length="12"))
    if then_reset:
        await asyncio.sleep(0.05)  # an RST at once would overtake what was written
        connection.reset()
    return False


@behaviour
async def one_too_many(
    request: Request, connection: Connection, unasked: Any, later: asyncio.Event | None = None
) -> bool:
    """What was asked, and then a reply more that nothing asked for: with it, or when `later` is set."""
    replies = [message(200, json.dumps(one).encode()) for one in (request.json, unasked)]
    if later is not None:
        await connection.write(replies.pop(0))
        await later.wait()
        later.clear()
    await connection.write(b"".join(replies))
    return True


def cut_gzip(value: Any) -> Behaviour:
    """A complete reply whose compressed body breaks off."""
    return status(200, gzip.compress(json.dumps(value).encode())[:-16], content_encoding="gzip")


def redirect(location: str) -> Behaviour:
    return status(307, b"", location=location)


@behaviour
async def reset(request: Request, connection: Connection) -> None:
    """Break the connection."""
    connection.reset()


@behaviour
async def forever(
    request: Request, connection: Connection, start: bytes, piece: bytes, every_s: float = 0.0
) -> None:
    """The start, and then piece after piece without an end: as fast as they are read, or one at a time."""
    await connection.write(start)
    while True:
        await connection.write(piece)
        await asyncio.sleep(every_s)


LOGIN, LONG = b"<html><body>Please log in</body></html>", message(200, b"", content_length="1000000")
html = partial(raw, message(200, LOGIN, content_type="text/html"))  # of a proxy, when its judge is gone
garbage = partial(raw, b"SSH-2.0-OpenSSH_9.6\r\n", then_close=True)
close = partial(raw, b"", then_close=True)  # without a word
silence = partial(after, 3600, close())
slow_loris = partial(forever, LONG, b" ", every_s=0.02)  # no single wait is long, and the whole never ends
slow_headers = partial(forever, b"HTTP/1.1 200 OK\r\n", b"x-slow: 1\r\n", every_s=0.02)
endless_headers = partial(forever, b"HTTP/1.1 200 OK\r\n", b"x-filler: " + b"y" * 4096 + b"\r\n")
CHUNKS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def endless(*, first: bytes = b" ", head: bytes = CHUNKS) -> Behaviour:
    """A chunked body without an end."""
    return forever(head + b"%x\r\n%s\r\n" % (len(first), first), b"10000\r\n%s\r\n" % (b" " * 2**16))


def gzip_bomb(megabytes: int = 512) -> Behaviour:
    """A small reply that decompresses to `megabytes` of spaces, made without holding them."""
    compressor = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    pieces = [compressor.compress(b" " * 2**20) for _ in range(megabytes)]
    return status(200, b"".join([*pieces, compressor.flush()]), content_encoding="gzip")


@contextlib.contextmanager
def dead_address(listens: bool = False) -> Iterator[str]:
    """An address that refuses connections, reserved so that nobody else takes it."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        if listens:
            holder.listen(128)
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


# The kernel takes connections, and nobody accepts them
stalled_listener = partial(dead_address, listens=True)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
