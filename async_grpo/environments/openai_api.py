"""Requests and answers as OpenAI's API has them, and `Result`, which agents report."""

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from async_grpo.environments.policy import Reply

MODEL = "policy"  # the name that the server gives it; any name is accepted
Word = Annotated[str, Field(min_length=1)]


class Request(BaseModel):
    """What both kinds of requests may say; all else is ignored."""

    model: str = MODEL
    n: Annotated[int, Field(ge=1, le=64)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class Function(BaseModel, extra="allow"):
    name: str
    arguments: str | dict[str, Any] = "{}"


class Call(BaseModel, extra="allow"):
    function: Function


class Text(BaseModel):
    type: Literal["text"]  # images are not taken
    text: str


class Plain(BaseModel):
    type: Literal["text"]


class ChatMessage(BaseModel, extra="allow"):
    role: str
    content: str | list[Text] | None = None
    tool_calls: list[Call] | None = None


class ChatRequest(Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    # Nothing can be forced: what is drawn is drawn as it is trained
    tool_choice: Literal["auto", "none"] | None = None
    response_format: Plain | None = None


class CompletionRequest(Request):
    prompt: str | list[Annotated[int, Field(ge=0)]]
    echo: Literal[False] | None = None


class Result(BaseModel):
    reward: FiniteFloat | None = None
    failure: str = ""  # then it has failed
    numbers: Annotated[dict[Annotated[str, Field(max_length=100)], FiniteFloat], Field(max_length=100)] = {}


async def read(kind: type[Any], request: web.Request) -> Any:
    """The body of a request; ValidationError, or an HTTP error, for what is none."""
    try:
        return TypeAdapter(kind).validate_python(json.loads(await request.text()))
    except (ValueError, RecursionError, LookupError) as error:
        if isinstance(error, ValidationError):
            raise
        raise web.HTTPBadRequest(text=f"the body is no JSON: {type(error).__name__}") from error


def as_template(message: ChatMessage) -> dict[str, Any]:
    """As chat templates know it: its content is one text."""
    told = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        told["content"] = "".join(part.text for part in message.content)
    return told


def body_of(asked: Request, replies: Sequence[Reply]) -> dict[str, Any]:
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


async def streamed(request: web.Request, asked: Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The answer as server-sent events."""
    usage = answer.pop("usage")
    if is_chat := isinstance(asked, ChatRequest):
        answer["object"] = "chat.completion.chunk"
    events = []
    for choice in answer.pop("choices"):
        index, reason = choice["index"], choice["finish_reason"]
        if is_chat:
            message = choice["message"]
            calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
            delta = {**message, **({"tool_calls": calls} if calls else {})}
            events += [{"index": index, "delta": delta, "finish_reason": None}]
            events += [{"index": index, "delta": {}, "finish_reason": reason}]
        else:
            events += [{"index": index, "text": choice["text"], "finish_reason": reason, "logprobs": None}]
    lines = [answer | {"choices": [event]} for event in events]
    if (asked.stream_options or {}).get("include_usage"):
        lines.append(answer | {"choices": [], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    with suppress(ConnectionError):  # who asked has gone: the turn counts all the same
        await response.prepare(request)
        for line in [*map(json.dumps, lines), "[DONE]"]:
            await response.write(f"data: {line}\n\n".encode())
        await response.write_eof()
    return response
