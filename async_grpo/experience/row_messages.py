"""Read messages and tools as people write them, and bring them into the form that chat templates expect.

`row_messages` and `row_tools` check the columns of a data row. `template_message` needs no row, so that requests to the
endpoint and environments can use it too.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import is_number, nearest, refuse
from async_grpo.processes.untrusted_files import parse_json

Message = Mapping[str, Any]  # as in OpenAI's API: role, content, tool_calls, tool_call_id
IMAGE_PART = {"type": "image"}  # an image in the content of a message, as chat templates expect it

# Roles of OpenAI's API. A template may know further ones, such as `ipython` of Llama 3 and `observation` of GLM
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SYSTEM_ROLES = ("system", "developer")
# Names of roles in other formats and of message fields in ShareGPT, with the names that this library uses
FOREIGN_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "model": "assistant",
}
FOREIGN_FIELDS = {"from": "role", "value": "content"}
JSON_NULLS = ("default", "const")  # fields of a JSON schema whose value may be null
CALL_EXAMPLE = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
MAX_SHOWN = 80  # characters of a value that an error message shows


def prompt_of(row: Mapping[str, Any]) -> Any:
    """Return the messages or the text of a row's prompt, or None if the row has neither.

    A column that is null counts as missing. An empty `input` counts as missing if there is a `prompt`.

    Raises:
        ConfigurationError: A column of the prompt has a value of another kind.
    """
    messages = row.get("messages")
    if messages is not None:
        refuse(
            not isinstance(messages, list),
            f"messages is a {type(messages).__name__}: it must be a list of objects with role and content; a text "
            "belongs in the column prompt",
        )
        return messages
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        return prompt
    text = row.get("input")
    if text is None or (text == "" and prompt is not None):
        text = prompt
    refuse(
        text is not None and not isinstance(text, str),
        f"the prompt is a {type(text).__name__}, {text!r:.{MAX_SHOWN}}: a row needs input_token_ids, messages, or "
        "prompt/input text; if a number is the question, write it as a text, in double quotes",
    )
    return text


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of the row's prompt, or [] if the prompt is not a conversation."""
    if row.get("input_token_ids") is not None:
        return []
    prompt = prompt_of(row)
    return [template_message(message) for message in prompt] if isinstance(prompt, list) else []


def row_messages(messages: Sequence[Any], known_roles: Collection[str] = ROLES) -> list[dict[str, Any]]:
    """Return a row's conversation in the form that chat templates expect, after checking that it asks for an answer.

    Args:
        messages: The row's messages.
        known_roles: Names of the roles that the chat template knows.

    Raises:
        ConfigurationError: A message has no role, an unknown role, or no text. Or the last message is the assistant's, so
            that the prompt would contain the answer.
    """
    refuse(not messages, "messages must be a list of objects with role and content, and it is empty")
    are_token_ids = all(type(message) is int for message in messages)
    hint = "; token ids belong into the column input_token_ids" if are_token_ids else ""
    checked = []
    for number, message in enumerate(messages, start=1):
        refuse(
            not isinstance(message, dict),
            f"messages must be a list of objects with role and content, and message {number} is "
            f"{message!r:.{MAX_SHOWN}}{hint}",
        )
        try:
            _check_fields(message, known_roles)
            checked.append(template_message(message))
        except ConfigurationError as error:
            raise ConfigurationError(f"message {number} of {len(messages)}: {error}") from error
    # Single messages may be empty: if a system message has the whole question, the user's message often has no text
    texts = [message["content"] or "" for message in checked]
    refuse(not "".join(texts).strip(), "the messages have no text, so there is no question")
    refuse(
        checked[-1]["role"] == "assistant",
        "the last message is the assistant's, so the prompt would contain an answer: remove it. If completions should "
        "continue a given beginning, write the whole prompt including it as a text into the column input",
    )
    return checked


def _check_fields(message: Message, known_roles: Collection[str]) -> None:
    foreign = {
        name: field for name, field in FOREIGN_FIELDS.items() if name in message and field not in message
    }
    renamings = ", ".join(f"{name} is called {field}" for name, field in foreign.items())
    hint = ""
    if renamings:
        hint = f" ({renamings} here; --prompt-column with the name of this column reads ShareGPT's rows)"
    role = message.get("role")
    refuse(role is None, f"it has no role; messages must be a list of objects with role and content{hint}")
    refuse(
        role not in known_roles,
        f"the role {role!r:.{MAX_SHOWN}} is unknown; known: {', '.join(known_roles)}{_nearest_role(role, known_roles)}",
    )
    has_calls = bool(message.get("tool_calls"))
    refuse(
        "content" not in message and not has_calls,
        f"it has no content; messages must be a list of objects with role and content{hint}",
    )
    name = message.get("name")
    refuse(
        name is not None and not isinstance(name, str),
        f"its name must be a text, not {name!r:.{MAX_SHOWN}}",
    )


def _nearest_role(role: Any, known_roles: Collection[str]) -> str:
    lower = str(role).strip().lower()
    role_here = FOREIGN_ROLES.get(lower, lower)
    return f"; did you mean {role_here}?" if role_here in known_roles else nearest(role, known_roles)


def share_gpt_question(messages: Sequence[Any]) -> list[Any]:
    """Return a ShareGPT conversation as messages with `role` and `content`, without an answer at its end.

    >>> share_gpt_question([{"from": "human", "value": "3 + 4?"}, {"from": "gpt", "value": "7"}])
    [{'role': 'user', 'content': '3 + 4?'}]
    """
    converted = []
    for message in messages:
        fields = {FOREIGN_FIELDS.get(name, name): value for name, value in message.items()}
        role = fields.get("role")
        if isinstance(role, str):
            fields["role"] = FOREIGN_ROLES.get(role, role)
        converted.append(fields)
    has_answer = converted[-1].get("role") == "assistant"
    return converted[:-1] if has_answer else converted


def template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect.

    The text parts of the content are joined, and a number becomes text. The arguments of tool calls, which are JSON texts
    in OpenAI's API, become objects. Fields that are null count as missing, except the content of a message with calls.

    Raises:
        ConfigurationError: The content is not text, or the tool calls are not a list of calls.
    """
    fields = {name: value for name, value in message.items() if value is not None}
    refuse(
        "function_call" in fields,
        "it has a function_call, the older form of a tool call, which chat templates leave out: write tool_calls, a list "
        f"of {CALL_EXAMPLE}",
    )
    if fields.get("tool_calls"):
        fields["tool_calls"] = _template_calls(fields["tool_calls"])
        fields["content"] = None
        if message.get("content") is not None:
            fields["content"] = _text_of(message["content"])
    else:
        fields.pop("tool_calls", None)
        refuse(
            message.get("content") is None,
            "its content is null, which only a message with tool calls may have: give a text",
        )
        fields["content"] = _text_of(message["content"])
    return fields


def message_with_parts(message: Message) -> dict[str, Any]:
    """Return the message of `template_message`; if it has an IMAGE_PART, its content stays a list of parts.

    Raises:
        ConfigurationError: See `template_message`.
    """
    content = message.get("content")
    if not isinstance(content, list) or IMAGE_PART not in content:
        return template_message(message)
    texts = [part for part in content if part != IMAGE_PART]
    return {**template_message({**message, "content": texts}), "content": content}


def _text_of(content: Any) -> str:
    """Return the content of a message as text."""
    if isinstance(content, str):
        return content
    if is_number(content):
        return str(content)
    refuse(
        not isinstance(content, list | tuple),
        f"its content must be a text or a list of text parts, not {content!r:.{MAX_SHOWN}}",
    )
    return "".join(_text_of_part(part) for part in content)


def _text_of_part(part: Any) -> str:
    is_object = isinstance(part, Mapping)
    kind = part.get("type") if is_object else None
    refuse(
        not is_object or kind is None,
        f'its content has the part {part!r:.{MAX_SHOWN}}: a part is {{"type": "text", "text": ...}}',
    )
    refuse(
        kind != "text",
        f"its content has a part of the type {kind!r:.{MAX_SHOWN}}: only parts of the type 'text' are supported",
    )
    refuse(
        not isinstance(part.get("text"), str),
        f"its content has a text part without text: {part!r:.{MAX_SHOWN}}",
    )
    return part["text"]


def _template_calls(calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with the arguments as objects."""
    refuse(not isinstance(calls, list | tuple), f"tool_calls must be a list, not {calls!r:.{MAX_SHOWN}}")
    template_calls = []
    for call in calls:
        refuse(
            not isinstance(call, Mapping), f"tool_calls has {call!r:.{MAX_SHOWN}}: a call is {CALL_EXAMPLE}"
        )
        # Some data sets leave out the object `function` around name and arguments
        is_bare = call.get("function") is None and "name" in call
        called = call if is_bare else call.get("function")
        if not isinstance(called, Mapping) or not isinstance(called.get("name"), str):
            raise ConfigurationError(f"tool_calls has {call!r:.{MAX_SHOWN}}: a call is {CALL_EXAMPLE}")
        function = dict(called)
        arguments = function.get("arguments")
        if arguments is None or arguments == "":  # a function without parameters
            function["arguments"] = {}
        elif isinstance(arguments, str | bytes):
            # A text that is not JSON, or is nested too deeply, stays a text
            with suppress(ValueError):
                function["arguments"] = parse_json(arguments)
        if is_bare:
            template_calls.append({"type": "function", "function": function})
        else:
            template_calls.append({**call, "function": function})
    return template_calls


def with_json_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose tool calls have JSON texts as arguments, for templates that expect texts."""
    converted = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments")
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        converted.append({**message, "tool_calls": calls} if calls else dict(message))
    return converted


def row_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the JSON schemas of the tools in a row's column `tools`, or None if it has none.

    Raises:
        ConfigurationError: The column is neither a list of JSON schemas nor the JSON text of such a list.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        # Parquet files contain such lists as text, because the schemas of different tools have different fields
        with suppress(ValueError):
            tools = parse_json(tools)
    if not tools:
        return None
    is_list_of_schemas = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    refuse(
        not is_list_of_schemas,
        f"the column tools must be a list of JSON schemas, not {row['tools']!r:.{MAX_SHOWN}}",
    )
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    """Return a JSON schema without the fields that are null. The fields of JSON_NULLS stay.

    In a Parquet file, all schemas of a list get the same fields. A field that a schema did not have gets the value null.
    """
    if isinstance(value, dict):
        fields = {}
        for name, item in value.items():
            if item is not None or name in JSON_NULLS:
                fields[name] = _without_nulls(item)
        return fields
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def num_characters(prompt: Any) -> int:
    """Return the number of characters of a prompt: a text, or messages whose contents are texts."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(message["content"] or "") for message in prompt)
