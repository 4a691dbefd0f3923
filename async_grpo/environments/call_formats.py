"""How model families write thoughts and tool calls, for the families whose formats are read in this process.

All other formats are read by vLLM's tool parsers, in a separate process (`call_reader`). The three formats here are
not left to vLLM because

- `hermes` is the most frequent one, and reading it here saves the start of that process,
- vLLM reads `openai` (gpt-oss) only from the token ids of that family's own vocabulary, which it downloads,
- vLLM reads `cohere_command3` only with a package that is not installed with it.

The functions take linear time. A regular expression would keep Python's lock while it searches a long text.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.processes.untrusted_files import parse_json

# Tags around a tool call, as Hermes, Qwen and other models write them
BEGIN_CALL = "<tool_call>"
END_CALL = "</tool_call>"
# Begin and end of a thought in the families of models
THOUGHT_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
)
# Control tokens of gpt-oss (https://github.com/openai/harmony)
HARMONY_START = "<|start|>"
HARMONY_MESSAGE = "<|message|>"
HARMONY_CHANNEL = "<|channel|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_RECIPIENT = "to=functions."


@dataclass(frozen=True)
class FunctionCall:
    """A call of a tool: the tool's name, and the JSON text of its arguments."""

    name: str
    arguments: str
    id: str | None = None  # the id that the policy wrote itself; None if its format has none


@dataclass(frozen=True)
class ReadTurn:
    """A turn of the policy, divided into its parts.

    Attributes:
        thought: What the policy thought; None if it did not think.
        content: What it said, without the calls.
        calls: The tools that it called, in order.
    """

    thought: str | None
    content: str
    calls: tuple[FunctionCall, ...] = ()


def split_thought(
    text: str, tags: Sequence[tuple[str, str]], is_open: bool = False
) -> tuple[str | None, str]:
    r"""Divide a turn into its thought and the rest. The thought is None if there is none.

    Args:
        text: The sampled text.
        tags: Begin and end tags of thoughts.
        is_open: Whether the prompt already ends with a begin tag.

    >>> split_thought("<think>2 + 2</think>\n\n4", THOUGHT_TAGS)
    ('2 + 2', '4')
    >>> split_thought("2 + 2</think>4", THOUGHT_TAGS, is_open=True)
    ('2 + 2', '4')
    >>> split_thought("It is 4.", THOUGHT_TAGS)
    (None, 'It is 4.')
    """
    for begin, end in tags:
        begins = text.lstrip().startswith(begin)
        thought, end_tag, rest = text.rpartition(end)
        if end_tag and (begins or is_open or begin not in thought):
            return thought.strip().removeprefix(begin).strip() or None, rest.lstrip()
        # The policy was cut off within its thought
        if not end_tag and begins:
            return text.lstrip().removeprefix(begin).strip(), ""
    # The text has no end tag. If the prompt opened a thought, all of the text belongs to it
    return (text.strip(), "") if is_open else (None, text)


def read_hermes(text: str) -> ReadTurn:
    """Read calls such as `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`.

    >>> read_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').calls
    (FunctionCall(name='add', arguments='{"a": 1}', id=None),)
    """
    content, call_texts = take_out_calls(text)
    calls = []
    for call_text in call_texts:
        call = _call_of_json(call_text)
        if call is not None:
            calls.append(call)
    return ReadTurn(None, content if calls else text, tuple(calls))


def take_out_calls(text: str) -> tuple[str, list[str]]:
    """Return the text without the tool calls, and the calls.

    A call is a text in braces between two tags, and contains no tag itself.

    >>> take_out_calls("a<tool_call> {1} </tool_call>b<tool_call>{2}<tool_call>c</tool_call>")
    ('ab<tool_call>{2}<tool_call>c</tool_call>', ['{1}'])
    """
    texts: list[str] = []
    calls: list[str] = []
    text_begin = 0  # beginning of the part that is not in `texts` yet
    begin = text.find(BEGIN_CALL)
    while begin >= 0:
        end = text.find(END_CALL, begin + len(BEGIN_CALL))
        if end < 0:
            break
        # Begin at the last begin tag before the end tag, so that the call contains no tag
        begin = text.rfind(BEGIN_CALL, begin, end)
        inside = text[begin + len(BEGIN_CALL) : end].strip()
        if len(inside) > 1 and inside.startswith("{") and inside.endswith("}"):
            texts.append(text[text_begin:begin])
            calls.append(inside)
            text_begin = end + len(END_CALL)
        begin = text.find(BEGIN_CALL, end)
    texts.append(text[text_begin:])
    return "".join(texts), calls


def read_harmony(text: str) -> ReadTurn:
    """Read a turn of gpt-oss. It consists of messages, each with a channel and, if it calls a tool, a recipient.

    >>> read_harmony("<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>")
    ReadTurn(thought='Add.', content='4', calls=())
    >>> read_harmony(' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>').calls
    (FunctionCall(name='add', arguments='{"a": 1}', id=None),)
    """
    thoughts: list[str] = []
    contents: list[str] = []
    calls: list[FunctionCall] = []
    for message in text.split(HARMONY_START):
        header, separator, body = message.partition(HARMONY_MESSAGE)
        if not separator:
            continue
        for end in HARMONY_ENDS:
            body = body.partition(end)[0]
        name = header.partition(HARMONY_RECIPIENT)[2].split("<|")[0].split(maxsplit=1)
        channel = header.partition(HARMONY_CHANNEL)[2].split("<|")[0].strip()
        if name:
            arguments = _object_of(body)
            if arguments is not None:
                calls.append(FunctionCall(name[0], arguments))
        elif channel.startswith("analysis"):
            thoughts.append(body)
        else:
            contents.append(body)
    if not (thoughts or contents or calls):
        return ReadTurn(None, text)
    return ReadTurn("\n".join(thoughts) if thoughts else None, "\n".join(contents), tuple(calls))


def read_command(text: str) -> ReadTurn:
    """Read a turn of Cohere's Command models, whose calls are one JSON list.

    >>> read_command('<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>').calls
    (FunctionCall(name='add', arguments='{"a": 1}', id=None),)
    """
    before, begin, rest = text.partition("<|START_ACTION|>")
    inside, _, after = rest.partition("<|END_ACTION|>")
    content = before + after
    for tag in ("<|START_RESPONSE|>", "<|END_RESPONSE|>"):
        content = content.replace(tag, "")
    if not begin:
        return ReadTurn(None, content)
    try:
        values = parse_json(inside)
    except ValueError:
        return ReadTurn(None, text)
    calls = []
    for value in values if isinstance(values, list) else [values]:
        call = _call_of_value(value)
        if call is not None:
            calls.append(call)
    return ReadTurn(None, content if calls else text, tuple(calls))


# Name of a format, as vLLM names its parsers -> function that reads the part of a turn after its thought
FORMATS: dict[str, Callable[[str], ReadTurn]] = {
    "hermes": read_hermes,
    "openai": read_harmony,
    "cohere_command3": read_command,
}


def _call_of_json(text: str) -> FunctionCall | None:
    try:
        return _call_of_value(parse_json(text))
    except ValueError:
        return None


def _call_of_value(value: Any) -> FunctionCall | None:
    """Return the call that a JSON value describes; None if it describes none.

    Families write the arguments as `arguments` or as `parameters`, as an object or as the JSON text of one.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("tool_name"))
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        decoded = _object_of(arguments)
        return None if decoded is None else FunctionCall(name, decoded)
    return FunctionCall(name, json.dumps(arguments))


def _object_of(text: str) -> str | None:
    """Parse the JSON text of an object and write the object as JSON again, as Python writes it. None if it is invalid."""
    try:
        value = parse_json(text.strip() or "{}")
    except ValueError:
        return None
    return json.dumps(value) if isinstance(value, dict) else None
