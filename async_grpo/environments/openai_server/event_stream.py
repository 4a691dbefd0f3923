"""`send_events`: sends an answer as server-sent events; `pieces_of`: the pieces in which a text is streamed."""

import json
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from async_grpo.processes.http_server import sending_in_time
from async_grpo.processes.offload import offloaded

MAX_PIECES = 32  # events of one streamed text
MIN_PIECE_CHARACTERS = 16


def pieces_of(text: str) -> list[str]:
    """Return the pieces in which a text is streamed; none for an empty text.

    Some clients, such as DSPy, treat a text that arrives in a single piece as a cached answer, and do not stream it.

    >>> pieces_of("The answer is 42, as everybody knows.")
    ['The answer is 42', ', as everybody k', 'nows.']
    """
    size = max(MIN_PIECE_CHARACTERS, -(-len(text) // MAX_PIECES))
    return [text[begin : begin + size] for begin in range(0, len(text), size)]


async def send_events(
    request: web.Request,
    events: Sequence[dict[str, Any]],
    event_characters: int,
    *,
    names_events: bool = False,
) -> web.StreamResponse:
    """Send the parts of an answer as server-sent events.

    Args:
        request: The request to answer.
        events: The parts of the answer.
        event_characters: Approximate number of characters of the largest part.
        names_events: Whether each event has its type as name, as in the Responses API. Otherwise, the stream ends with
            "[DONE]", as in the other parts of OpenAI's API.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    async with sending_in_time(request):
        await response.prepare(request)
        for event in events:
            name = f"event: {event['type']}\n" if names_events else ""
            data = await offloaded(event_characters, json.dumps, event)
            await response.write(f"{name}data: {data}\n\n".encode())
        if not names_events:
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    return response
