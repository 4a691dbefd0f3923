"""`TypedOutput`: the form that a request requires of the policy's turn, JSON of a schema or calls of tools.

With `--typed-output enforce`, the engine only samples tokens that fit the form. With `hint`, the prompt describes the form,
and the policy samples freely. Then an answer in another form is no error, and the agent may give it a low reward.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from async_grpo.errors import RequestRefused
from async_grpo.experience.row_messages import Message

# Limit for names of models, roles and functions. A streamed answer repeats the model's name in each event
MAX_NAME_CHARACTERS = 256
ANY_OBJECT = '{"type": "object"}'
# Schemas are limited, because the engine compiles a schema before it samples the first token
MAX_SCHEMA_CHARACTERS = 65_536
MAX_DESCRIPTION_CHARACTERS = 4096

Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class PlainText(BaseModel):
    """A response format that requires nothing."""

    type: Literal["text"]


class JsonObject(BaseModel):
    """A response format that requires some JSON object."""

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """A JSON schema with its name. `strict` is accepted, and makes no difference: every schema is enforced."""

    name: Name = "answer"
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)] | None = None
    definition: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchema(BaseModel):
    """A response format that requires JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class FunctionName(BaseModel):
    """The name of a tool."""

    name: Name


class NamedTool(BaseModel):
    """A tool choice that requires a call of one tool."""

    type: Literal["function"]
    function: FunctionName


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]
ToolChoice = Literal["auto", "none", "required"] | NamedTool


@dataclass(frozen=True)
class TypedOutput:
    """The form that a request requires of the policy's turn.

    Attributes:
        schema: JSON text of the schema that the answer must fit; "" if the answer may be any text.
        description: The request's description of the schema; "" if there is none.
        required_tools: Names of tools. If there are any, the turn must consist of calls of these tools.
        has_one_call: Whether the turn must not have more than one call.
    """

    schema: str = ""
    description: str = ""
    required_tools: tuple[str, ...] = ()
    has_one_call: bool = False

    def instruction(self, has_tools: bool) -> str:
        """Return the form as an instruction to the policy.

        Args:
            has_tools: Whether the policy may call tools instead of giving its answer.

        >>> TypedOutput(required_tools=("add",), has_one_call=True).instruction(has_tools=True)
        'Your next message must be one call of the tool add.'
        """
        if self.required_tools:
            tools = "the tool " if len(self.required_tools) == 1 else "one of the tools "
            calls = "one call of " if self.has_one_call else "a call of "
            return f"Your next message must be {calls}{tools}{', '.join(self.required_tools)}."
        beginning = "Unless you call a tool, answer" if has_tools else "Answer"
        description = f" ({self.description})" if self.description else ""
        if self.schema == ANY_OBJECT:
            return f"{beginning} with one JSON object{description}, and with nothing before or after it."
        return (
            f"{beginning} with JSON{description} that fits this JSON schema, and with nothing before or after it:\n"
            f"{self.schema}"
        )


def typed_output_of(
    response_format: PlainText | JsonObject | JsonSchema | None,
    tool_choice: str | NamedTool | None,
    tools: Sequence[Mapping[str, Any]] | None,
    parallel_tool_calls: bool | None = None,
) -> TypedOutput | None:
    """Return the form that a request requires, or None if the policy may answer as it likes.

    If the tool choice requires a call, the response format has no effect, because it describes answers without calls.

    Args:
        response_format: The form of the answer.
        tool_choice: Whether tools must be called.
        tools: JSON schemas of the tools, as in OpenAI's chat completions.
        parallel_tool_calls: Whether a turn may have several calls; None allows them.

    Raises:
        RequestRefused: There is no such tool, or the schema is too long.
    """
    if isinstance(tool_choice, NamedTool) or tool_choice == "required":
        names = tool_names(tools or ())
        if isinstance(tool_choice, NamedTool):
            if tool_choice.function.name not in names:
                raise RequestRefused(f"tool_choice: `tools` has no function {tool_choice.function.name!r}")
            return TypedOutput(required_tools=(tool_choice.function.name,), has_one_call=True)
        if not names:
            raise RequestRefused("tool_choice: a call is required, and `tools` has no function")
        return TypedOutput(required_tools=names, has_one_call=parallel_tool_calls is False)
    has_one_call = parallel_tool_calls is False
    if isinstance(response_format, JsonObject):
        return TypedOutput(schema=ANY_OBJECT, has_one_call=has_one_call)
    if isinstance(response_format, JsonSchema):
        named_schema = response_format.json_schema
        return TypedOutput(
            schema=_schema_text(named_schema.definition),
            description=named_schema.description or "",
            has_one_call=has_one_call,
        )
    return None


def tool_names(tools: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the functions among the tools, each once and in their order.

    >>> tool_names([{"type": "function", "function": {"name": "add"}}, {"type": "web_search"}])
    ('add',)
    """
    names: dict[str, None] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            names[function["name"]] = None
    return tuple(names)


def _schema_text(schema: Mapping[str, Any]) -> str:
    text = json.dumps(schema, ensure_ascii=False)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise RequestRefused(
            f"response_format: the JSON schema has {len(text)} characters, but at most {MAX_SCHEMA_CHARACTERS} are allowed"
        )
    return text


def with_instruction(
    messages: Sequence[Message], instruction: str, system_prompt: str | None = None
) -> list[Message]:
    """Return the messages with an instruction at the end of their system message.

    Args:
        messages: The conversation.
        instruction: The instruction.
        system_prompt: Content of the system message if the conversation has none (`--system-prompt`).

    >>> with_instruction([{"role": "user", "content": "2 + 2?"}], "Answer in JSON.")[0]
    {'role': 'system', 'content': 'Answer in JSON.'}
    """
    first = messages[0] if messages else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        content = f"{first['content']}\n\n{instruction}"
        return [{**first, "content": content}, *messages[1:]]
    content = instruction if system_prompt is None else f"{system_prompt}\n\n{instruction}"
    return [{"role": "system", "content": content}, *messages]
