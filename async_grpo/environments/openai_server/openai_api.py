"""Requests and answers in the form of OpenAI's API, and the `Result` that agents report."""

import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, Field, FiniteFloat

from async_grpo.environments.openai_server.event_stream import pieces_of
from async_grpo.environments.trajectory_client import Reply
from async_grpo.environments.typed_output import Name, NamedTool, ResponseFormat, ToolChoice
from async_grpo.metrics.free_numbers import MAX_EXTRA, NUMBER_NAME

MODEL = "policy"  # the model's name in the server's list of models. Requests may use any other name
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # text parts in one message
MAX_CALLS = 256  # tool calls in one message
MAX_TOOLS = 1024
MAX_TYPE_CHARACTERS = 40  # maximum number of characters of a tool's type that an error message shows
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_ANSWERS = 64

Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class OpenAIRequest(BaseModel):
    """Fields that chat and text requests share. Unknown fields are ignored.

    The validation of a list stops at its first error, because collecting all errors of a long list takes too long.
    """

    model: Name = MODEL
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None


class Function(BaseModel, extra="allow"):
    """The function of a tool call: its name, and its arguments as JSON."""

    name: Name
    arguments: str | dict[str, Any] = "{}"


class Call(BaseModel, extra="allow"):
    """A tool call in a message."""

    function: Function


class Text(BaseModel):
    """A text part of a message's content. Parts of other types than text and image are refused."""

    type: Literal["text"]
    text: str


class ImageAddress(BaseModel):
    """The address of an image, which must be a data URL."""

    url: str


class Image(BaseModel):
    """An image part of a message's content, for models that read images."""

    type: Literal["image_url"]
    image_url: ImageAddress


Part = Annotated[Text | Image, Discriminator("type")]


class ChatMessage(BaseModel, extra="allow"):
    """A message. Further fields are allowed, and are passed to the chat template."""

    role: Name
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None


def refuse_hosted(tool_type: Any) -> Any:
    """Refuse the type of a tool that OpenAI's server would run, with its name. See `BeforeValidator`."""
    if isinstance(tool_type, str) and tool_type != "function":
        raise ValueError(f"the tool {tool_type[:MAX_TYPE_CHARACTERS]!r} does not exist here")
    return tool_type


class Tool(BaseModel, extra="allow"):
    """A tool of the agent. Its function and further fields are passed to the chat template as they are."""

    type: Annotated[Literal["function"], BeforeValidator(refuse_hosted)] = "function"
    function: dict[str, Any]


def _checked_tool(tool: Any) -> Any:
    """Check a tool, and return it as it is, because the prompt contains exactly the fields that the agent sent."""
    Tool.model_validate(tool)
    return tool


ToolOfRequest = Annotated[dict[str, Any], AfterValidator(_checked_tool)]


class ChatRequest(OpenAIRequest):
    """A request for a turn that continues a conversation."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[ToolOfRequest], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(OpenAIRequest):
    """A request for a turn that continues a text or token ids."""

    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    echo: Literal[False] | None = None


NumberName = Annotated[str, Field(pattern=f"^{NUMBER_NAME}$")]
Number = Annotated[FiniteFloat, Field(ge=-MAX_EXTRA, le=MAX_EXTRA)]


class Result(BaseModel):
    """The result of a trajectory that its agent reports: a reward or a failure."""

    reward: FiniteFloat | None = None
    failure: str = ""  # reason why the trajectory cannot be scored; "" if there is a reward
    numbers: Annotated[dict[NumberName, Number], Field(max_length=100)] = {}


def as_template(message: ChatMessage) -> dict[str, Any]:
    """Return the message in the form that chat templates expect, with its text parts joined to one text.

    If it has an image, its content stays a list of parts.
    """
    fields = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        texts = [part.text for part in message.content if isinstance(part, Text)]
        if len(texts) == len(message.content):
            fields["content"] = "".join(texts)
    return fields


def body_of(request: OpenAIRequest, replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the answer to a request, with one choice for each reply."""
    is_chat = isinstance(request, ChatRequest)
    # If the request names the tool to call, OpenAI's API returns the finish reason "stop" for the call
    is_named_call = isinstance(request, ChatRequest) and isinstance(request.tool_choice, NamedTool)
    make_choice = partial(_chat_choice, is_named_call=is_named_call) if is_chat else _text_choice
    prompt_tokens = replies[0].prompt_tokens
    completion_tokens = sum(len(reply.completion) for reply in replies)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [make_choice(index, reply) for index, reply in enumerate(replies)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _chat_choice(index: int, reply: Reply, *, is_named_call: bool) -> dict[str, Any]:
    message = dict(reply.message)
    reason = _finish_reason(reply)
    if message.get("tool_calls") and not is_named_call:
        reason = "tool_calls" if reason == "stop" else reason
    return {"index": index, "message": message, "finish_reason": reason, "logprobs": None}


def _text_choice(index: int, reply: Reply) -> dict[str, Any]:
    text = reply.message["content"]
    return {"index": index, "text": text, "finish_reason": _finish_reason(reply), "logprobs": None}


def _finish_reason(reply: Reply) -> str:
    return "length" if reply.completion.truncated else "stop"


def events_of(request: OpenAIRequest, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Split the answer into the events that clients of a stream expect."""
    frame = {key: value for key, value in answer.items() if key not in ("usage", "choices")}
    is_chat = isinstance(request, ChatRequest)
    if is_chat:
        frame["object"] = "chat.completion.chunk"
    choices: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        choices += _chat_deltas(choice) if is_chat else [choice]
    if not (request.stream_options or {}).get("include_usage"):
        return [frame | {"choices": [choice]} for choice in choices]
    # As in OpenAI's API, each event has the field `usage`, but it has a value only in the last event
    events = [frame | {"choices": [choice], "usage": None} for choice in choices]
    return [*events, frame | {"choices": [], "usage": answer["usage"]}]


def _chat_deltas(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a choice as events: its role, its thought, its content, its calls, and the finish reason.

    A long text is several events. A call is two events, one with its id and name and one with its arguments, because
    some clients expect this.
    """
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for name in ("reasoning_content", "content"):
        deltas += [{name: piece} for piece in pieces_of(message.get(name) or "")]
    for number, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        named_call = {**call, "index": number, "function": {"name": function["name"], "arguments": ""}}
        arguments = {"index": number, "function": {"arguments": function["arguments"]}}
        deltas += [{"tool_calls": [named_call]}, {"tool_calls": [arguments]}]
    events = [{"index": choice["index"], "delta": delta, "finish_reason": None} for delta in deltas]
    return [*events, {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]
