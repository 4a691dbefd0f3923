"""`OwnUserOnly` lets judge servers answer only the user who started them, and only under an IP address or localhost.

vLLM's API key protects only the paths below /v1, but not /sleep, /pooling, /tokenize and the endpoints for developers.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from async_grpo.processes.http_host import REFUSAL, REFUSAL_OF_USERS, is_address, may_read

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class OwnUserOnly:
    """ASGI middleware for vLLM's `--middleware`, which answers only the user who started the server.

    It also refuses requests that address the server by a host name (see `http_host`).
    """

    def __init__(self, app: Application) -> None:
        self._application = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an allowed request. Answer a refused one with status 403, or close it if it is a websocket."""
        reason = ""
        # Lifespan events come from the server itself and need no check
        if scope["type"] != "lifespan":
            reason = await asyncio.to_thread(refusal, scope)
        if not reason:
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": reason.encode()})


def refusal(scope: Scope) -> str:
    """Return why a request is refused, or "" if it is allowed."""
    hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not is_address(hosts[0]):
        return REFUSAL
    client = scope.get("client")
    server = scope.get("server")
    if client is None or server is None or not may_read(tuple(client), tuple(server)):
        return REFUSAL_OF_USERS
    return ""
