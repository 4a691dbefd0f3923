"""`/v1/responses` of OpenAI's API."""

import json
import secrets
from functools import partial
from typing import Any

from aiohttp import web

from async_grpo.environments.openai_server.event_stream import send_events
from async_grpo.environments.openai_server.open_trajectory import Trajectory
from async_grpo.environments.openai_server.request_body import parsed_body, read_body
from async_grpo.environments.openai_server.request_faults import validated
from async_grpo.environments.openai_server.responses_answer import response_events, response_of
from async_grpo.environments.openai_server.responses_request import ResponsesRequest
from async_grpo.environments.openai_server.unsupported_fields import (
    RESPONSES_HINTS,
    RESPONSES_UNSUPPORTED,
    ignored_fields,
)
from async_grpo.environments.trajectory_client import SharedContext
from async_grpo.processes.offload import offloaded

RESPONSE_ID = "response_id"  # name of the id in the path of a stored answer


async def answer_responses_request(request: web.Request, trajectory: Trajectory) -> web.StreamResponse:
    """Have the policy take a turn, and return it as the Responses API does, or as a stream of events.

    Raises:
        HTTPException: The body is too large, or fields are wrong or not supported.
        ConfigurationError: The request refers to an answer that is not stored, or the chat template refuses it.
    """
    policy = trajectory.policy
    body = await read_body(request, policy.limits.tokens, has_images=policy.reads_images)
    parsed, ignored = await offloaded(len(body), _parsed, body)
    policy.ignored_fields.update(ignored)
    conversation = await offloaded(len(body), trajectory.responses.conversation, parsed)
    messages = conversation.messages
    if parsed.instructions is not None:
        messages = [{"role": "system", "content": parsed.instructions}, *messages]
    take_turn = partial(
        policy.complete,
        SharedContext(messages, conversation.num_bytes),
        tools=parsed.chat_tools(),
        max_tokens=parsed.max_output_tokens,
        typed=parsed.typed_output(),
    )
    (reply,) = await trajectory.take_turns(take_turn, count=1)
    # The answer repeats the tools and the instructions of the request
    size = len(body) + len(reply.text)
    response = await offloaded(size, response_of, parsed, secrets.token_hex(12), reply)
    text = await offloaded(size, json.dumps, response)
    if parsed.store is not False:
        trajectory.responses.add(response, text, conversation, reply.message)
    if parsed.stream:
        return await send_events(request, response_events(response), size, names_events=True)
    return web.Response(text=text, content_type="application/json")


async def stored_response(request: web.Request, trajectory: Trajectory) -> web.StreamResponse:
    """Return a stored answer, or remove it, depending on the request's method.

    Raises:
        ResponseNotFound: The trajectory has no stored answer with the id in the request's path.
    """
    response_id = request.match_info[RESPONSE_ID]
    if request.method == "DELETE":
        trajectory.responses.remove(response_id)
        return web.json_response({"id": response_id, "object": "response", "deleted": True})
    return web.Response(text=trajectory.responses.text(response_id), content_type="application/json")


def _parsed(body: bytes) -> tuple[ResponsesRequest, list[str]]:
    """Return the parsed request, and the names of its ignored fields."""
    fields: Any = parsed_body(body)
    parsed = validated(ResponsesRequest, fields, RESPONSES_HINTS, RESPONSES_UNSUPPORTED)
    return parsed, ignored_fields(fields)
