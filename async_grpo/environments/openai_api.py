"""Requests and answers as OpenAI's API has them, and `Result`, which agents report."""

import asyncio
import json
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field, FiniteFloat

from async_grpo.environments.trajectory_client import Reply
from async_grpo.metrics.free_numbers import MAX_EXTRA, NUMBER_NAME
from async_grpo.processes.http_server import ANSWER_WITHIN_S
from async_grpo.processes.offload import offloaded

MODEL = "policy"  # the name that the server gives it; any name is accepted
MAX_NAME_CHARACTERS = (
    256  # of a model, a role, a function; a streamed answer repeats the model's name in each event
)
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # of one message
MAX_CALLS = 256  # of tools, in one message
MAX_TOOLS = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_ANSWERS = 64

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class OpenAIRequest(BaseModel):
    """What both kinds of requests may say; all else is ignored.

    Lists fail at their first fault: collecting those of a long list would take as long as a long conversation.
    """

    model: Name = MODEL
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class Function(BaseModel, extra="allow"):
    name: Name
    arguments: str | dict[str, Any] = "{}"


class Call(BaseModel, extra="allow"):
    function: Function


class Text(BaseModel):
    type: Literal["text"]  # images are not taken
    text: str


class Plain(BaseModel):
    type: Literal["text"]


class ChatMessage(BaseModel, extra="allow"):
    role: Name
    content: str | Annotated[list[Text], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    # Nothing can be forced: what is drawn is drawn as it is trained
    tool_choice: Literal["auto", "none"] | None = None
    response_format: Plain | None = None


class CompletionRequest(OpenAIRequest):
    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    echo: Literal[False] | None = None


NumberName = Annotated[str, Field(pattern=f"^{NUMBER_NAME}$")]
Number = Annotated[FiniteFloat, Field(ge=-MAX_EXTRA, le=MAX_EXTRA)]


class Result(BaseModel):
    reward: FiniteFloat | None = None
    failure: str = ""  # then it has failed
    numbers: Annotated[dict[NumberName, Number], Field(max_length=100)] = {}


def as_template(message: ChatMessage) -> dict[str, Any]:
    """Return the message as chat templates know it: its content is one text."""
    plain = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        plain["content"] = "".join(part.text for part in message.content)
    return plain


def body_of(asked: OpenAIRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    is_chat, tokens = isinstance(asked, ChatRequest), sum(len(reply.completion) for reply in replies)
    choices = []
    for index, reply in enumerate(replies):
        reason = "length" if reply.completion.truncated else "stop"
        if is_chat:
            message = dict(reply.message)
            if message.get("tool_calls"):
                reason = "tool_calls" if reason == "stop" else reason
            choices.append({"index": index, "message": message, "finish_reason": reason, "logprobs": None})
        else:
            text = reply.message["content"]
            choices.append({"index": index, "text": text, "finish_reason": reason, "logprobs": None})
    given = replies[0].prompt_tokens
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": choices,
        "usage": {"prompt_tokens": given, "completion_tokens": tokens, "total_tokens": given + tokens},
    }


def events_of(asked: OpenAIRequest, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the answer in the pieces that clients of a stream expect."""
    frame = {key: value for key, value in answer.items() if key not in ("usage", "choices")}
    is_chat = isinstance(asked, ChatRequest)
    if is_chat:
        frame["object"] = "chat.completion.chunk"
    events = []
    for choice in answer["choices"]:
        index, reason = choice["index"], choice["finish_reason"]
        if is_chat:
            delta = dict(choice["message"])
            calls = [{"index": number, **call} for number, call in enumerate(delta.get("tool_calls", ()))]
            if calls:
                delta["tool_calls"] = calls
            events.append({"index": index, "delta": delta, "finish_reason": None})
            events.append({"index": index, "delta": {}, "finish_reason": reason})
        else:
            text = choice["text"]
            events.append({"index": index, "text": text, "finish_reason": reason, "logprobs": None})
    pieces = [frame | {"choices": [event]} for event in events]
    if (asked.stream_options or {}).get("include_usage"):
        pieces.append(frame | {"choices": [], "usage": answer["usage"]})
    return pieces


async def streamed(
    request: web.Request, pieces: Sequence[dict[str, Any]], piece_size: int
) -> web.StreamResponse:
    """Send the pieces as server-sent events; `piece_size`: characters of the largest."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await response.prepare(request)
            for piece in pieces:
                line = await offloaded(piece_size, json.dumps, piece)
                await response.write(f"data: {line}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:
        pass  # the client has gone: the turn counts all the same
    return response
