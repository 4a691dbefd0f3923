"""Requests of OpenAI's Responses API, and the conversation that a request continues.

The input of a request is a text or a list of items. A turn of the policy consists of several items: its thought, its text
and each of its calls. They are joined to one message again, because the recorder finds the policy's turns by their
messages.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from async_grpo.environments.openai_server.openai_api import (
    MAX_CALLS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    MODEL,
    refuse_hosted,
)
from async_grpo.environments.openai_server.responses_content import InputContent, chat_content
from async_grpo.environments.typed_output import (
    MAX_DESCRIPTION_CHARACTERS,
    FunctionName,
    JsonObject,
    JsonSchema,
    Name,
    NamedSchema,
    NamedTool,
    PlainText,
    TypedOutput,
    typed_output_of,
)
from async_grpo.options.fields import refuse

MAX_ITEMS = MAX_MESSAGES  # items in the input of one request
MAX_INCLUDED = 64
# Limits of OpenAI's API for metadata, which the answer repeats
MAX_METADATA = 16
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 512
# Beginning of the ids of calls. In answers of the endpoint, the id is fc_TURN_CALL: the id of the turn, and the number of
# the call in the turn
CALL_PREFIX = "fc_"

MetadataKey = Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARACTERS)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE_CHARACTERS)]


class MessageItem(BaseModel):
    """A message of the user, of the developer, or of the policy."""

    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent


class CallItem(BaseModel):
    """A call of a tool by the policy."""

    id: Name | None = None
    call_id: Name
    name: Name
    arguments: str


class CallOutputItem(BaseModel):
    """The answer of a tool."""

    call_id: Name
    output: InputContent


class ThoughtPart(BaseModel):
    """A part of a thought."""

    type: Literal["reasoning_text"]
    text: str


class ThoughtItem(BaseModel):
    """A thought of the policy. A summary is ignored, because the endpoint makes none."""

    content: Annotated[list[ThoughtPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


class ReferenceItem(BaseModel):
    """A reference to an item of an earlier answer, which is stored."""

    id: Name


def _type_of_item(item: Any) -> str:
    """Return the type of an item. In OpenAI's API, messages and references may leave it out."""
    fields = item if isinstance(item, dict) else {}
    default = "message" if "role" in fields or "id" not in fields else "item_reference"
    return str(fields.get("type") or default)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ThoughtItem, Tag("reasoning")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(_type_of_item),
]


class FunctionTool(BaseModel):
    """A tool of the agent. Tools that OpenAI's server would run, such as web_search, are refused.

    `strict` is ignored. Only some frameworks set it, and it would appear in the prompts of templates that write the whole
    schema.
    """

    type: Annotated[Literal["function"], BeforeValidator(refuse_hosted)]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def as_chat(self) -> dict[str, Any]:
        """Return the tool in the form of chat completions."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


class TextSchema(BaseModel):
    """A text format that requires JSON that fits a schema."""

    type: Literal["json_schema"]
    name: Name = "answer"
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextSettings(BaseModel):
    """Settings of the answer's text. Its verbosity is ignored."""

    format: Annotated[PlainText | JsonObject | TextSchema, Field(discriminator="type")] | None = None


class ChosenFunction(BaseModel):
    """A tool choice that requires a call of one tool."""

    type: Literal["function"]
    name: Name


# Further parts of an answer that a request may ask for. The endpoint sends none of them. The encrypted thought is null,
# because the answer contains the thought itself
Includable = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponsesRequest(BaseModel):
    """A request for a turn. Unknown fields are ignored."""

    model: Name = MODEL
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextSettings | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    include: Annotated[list[Includable], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = None
    stream: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=MAX_METADATA)] | None = None

    def chat_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools that the policy may call, in the form of chat completions; None if there are none."""
        if self.tool_choice == "none" or not self.tools:
            return None
        return [tool.as_chat() for tool in self.tools]

    def typed_output(self) -> TypedOutput | None:
        """Return the form that the request requires of the turn, or None if the policy may answer as it likes.

        Raises:
            RequestRefused: There is no such tool, or the schema is too long.
        """
        tool_choice: str | NamedTool | None = None
        if isinstance(self.tool_choice, ChosenFunction):
            tool_choice = NamedTool(type="function", function=FunctionName(name=self.tool_choice.name))
        else:
            tool_choice = self.tool_choice
        return typed_output_of(
            self._response_format(),
            tool_choice,
            self.chat_tools(),
            self.parallel_tool_calls,
        )

    def _response_format(self) -> PlainText | JsonObject | JsonSchema | None:
        """Return the text format in the form of chat completions."""
        text_format = self.text.format if self.text else None
        if not isinstance(text_format, TextSchema):
            return text_format
        named_schema = NamedSchema.model_validate(text_format.model_dump(by_alias=True))
        return JsonSchema(type="json_schema", json_schema=named_schema)


def messages_of_input(
    request_input: str | Sequence[Item], earlier_messages: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the input of a request as messages of a chat. References must be resolved before.

    Args:
        request_input: The input of the request.
        earlier_messages: The conversation before the input.

    Raises:
        ConfigurationError: A turn has too many calls.
    """
    if isinstance(request_input, str):
        return [{"role": "user", "content": request_input}]
    conversation = _Conversation(_names_of_calls(earlier_messages))
    for item in request_input:
        conversation.add(item)
    for message in conversation.messages:
        # Only a message with calls may have no content
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return conversation.messages


class _Conversation:
    """Messages that are put together from items, which are added in their order.

    Args:
        tool_names: The names of the tools that earlier messages call, by the ids of the calls.
    """

    def __init__(self, tool_names: dict[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        # Whether the last message is a turn of the policy to which items may be added
        self._is_turn_open = False
        self._tool_names = tool_names
        self._turns: dict[str, dict[str, Any]] = {}  # id of a turn -> its message

    def add(self, item: Item) -> None:
        """Add an item of the input."""
        if isinstance(item, ThoughtItem):
            self._add_thought(item)
        elif isinstance(item, CallItem):
            self._add_call(item)
        elif isinstance(item, CallOutputItem):
            self._add_output(item)
        elif isinstance(item, MessageItem) and item.role == "assistant":
            message = self._open_turn(unless=("content", "tool_calls"))
            message["content"] = chat_content(item.content)
        elif isinstance(item, MessageItem):
            self.messages.append({"role": item.role, "content": chat_content(item.content)})
            self._is_turn_open = False

    def _open_turn(self, unless: Sequence[str] = ()) -> dict[str, Any]:
        """Return the message of the policy's open turn, or of a new turn.

        Args:
            unless: Fields that the open turn must not have yet. If it has one, a new turn is begun.
        """
        if self._is_turn_open and all(self.messages[-1].get(name) is None for name in unless):
            return self.messages[-1]
        message: dict[str, Any] = {"role": "assistant", "content": None}
        self.messages.append(message)
        self._is_turn_open = True
        return message

    def _add_thought(self, item: ThoughtItem) -> None:
        self._is_turn_open = False
        # Some clients send thoughts back without their text. The policy's turn is recognized without the thought
        if item.content is not None:
            self._open_turn()["reasoning_content"] = "".join(part.text for part in item.content)

    def _add_call(self, item: CallItem) -> None:
        turn_id = turn_of_call(item.id)
        # Some agents send the answer of each call directly after the call, so the turn may be an earlier message
        message = self._turns.get(turn_id) if turn_id else None
        if message is None:
            message = self._open_turn()
        if turn_id:
            self._turns[turn_id] = message
        calls = message.setdefault("tool_calls", [])
        refuse(len(calls) == MAX_CALLS, f"input: a turn of the policy has more than {MAX_CALLS} calls")
        function = {"name": item.name, "arguments": item.arguments}
        calls.append({"id": item.call_id, "type": "function", "function": function})
        self._tool_names[item.call_id] = item.name

    def _add_output(self, item: CallOutputItem) -> None:
        message = {"role": "tool", "tool_call_id": item.call_id, "content": chat_content(item.output)}
        # Some chat templates write the name of the tool
        if item.call_id in self._tool_names:
            message["name"] = self._tool_names[item.call_id]
        self.messages.append(message)
        self._is_turn_open = False


def turn_of_call(item_id: str | None) -> str:
    """Return the part of a call's id that is the same for all calls of a turn; "" if the id is not the endpoint's.

    >>> turn_of_call("fc_1f2e_0")
    '1f2e'
    >>> turn_of_call("fc_1f2e")
    ''
    """
    if item_id is None or not item_id.startswith(CALL_PREFIX):
        return ""
    turn_id, _, _ = item_id.removeprefix(CALL_PREFIX).rpartition("_")
    return turn_id


def _names_of_calls(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of the tools that messages call, by the ids of the calls."""
    names = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
    return names
