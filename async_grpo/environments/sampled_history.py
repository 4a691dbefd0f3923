"""`SampledHistory`: finds the policy's turns of one trajectory in the messages that an agent sends back.

The chat template gets such a turn in one of several spellings. They are tried in this order, until the rendered
conversation begins with the tokens that the engine has already read and sampled:

1. SAMPLED: the sampled text is the message's content.
2. OPENED: the content is the text with which the prompt opened the turn, such as "<think>", followed by the sampled text.
3. STRUCTURED: the message has its calls and its thought in separate fields, as another client would send it. This is also
   used if no spelling continues the known tokens.
4. RENAMED: as STRUCTURED, with the thought also in the fields in which some model families expect it.

Some templates need STRUCTURED. Gemma 4's template leaves out the answer of a tool if the message before it has no calls.
The templates of Mistral, gpt-oss and MiniMax-M2 refuse such an answer.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from async_grpo.environments.chat import Chat
from async_grpo.experience.row_messages import Message
from async_grpo.processes.untrusted_files import parse_json

# Fields in which the templates of gpt-oss and Command expect the thought before a call
THOUGHT_FIELDS = ("thinking", "tool_plan")
MAX_CANONICAL_CHARACTERS = 32_768  # arguments of a call that are longer are compared as they are written


class Spelling(Enum):
    """The form in which the chat template gets an earlier turn of the policy."""

    SAMPLED = "sampled"
    OPENED = "opened"
    STRUCTURED = "structured"
    RENAMED = "renamed"


@dataclass(frozen=True)
class SampledTurn:
    """A turn of the policy."""

    number: int
    text: str  # the sampled text
    thought: str | None  # the part of the text that the message has as `reasoning_content`


class SampledHistory:
    """The policy's turns, found by the messages that the agent received for them.

    Attributes:
        last_spelling: The spelling (see the docstring of the module) that fitted the last request. It is tried first.
        num_rewritten: Number of requests whose history did not continue the known tokens in any spelling.
    """

    def __init__(self) -> None:
        self.last_spelling = Spelling.SAMPLED
        self.num_rewritten = 0
        self._turns: dict[str, list[SampledTurn]] = {}

    def add(self, message: Message, turn: SampledTurn) -> None:
        """Remember a turn by the message that was made from it."""
        for key in {message_key(message), message_key(message, with_thought=True)}:
            self._turns.setdefault(key, []).append(turn)

    def turns_of(self, messages: Sequence[Message]) -> dict[int, SampledTurn]:
        """Find the turn from which each message was made. Return the turns by the index of their message.

        Messages that were not made from a turn, or whose thought the agent has changed, have no entry. If several turns
        gave equal messages, the last of these messages gets the last of these turns, and so on backwards. Turns may be
        left over, because the agent may have thrown them away.
        """
        turns_by_index: dict[int, SampledTurn] = {}
        num_assigned: dict[str, int] = {}
        for index in range(len(messages) - 1, -1, -1):
            if messages[index].get("role") != "assistant":
                continue
            # Most clients of OpenAI's API do not send the thought back
            key = message_key(messages[index], with_thought=bool(messages[index].get("reasoning_content")))
            turns = self._turns.get(key)
            if turns:
                num_assigned[key] = num_assigned.get(key, 0) + 1
                turns_by_index[index] = turns[max(0, len(turns) - num_assigned[key])]
        return turns_by_index

    def spellings_to_try(self, has_turns: bool) -> Iterator[Spelling]:
        """Yield the spellings in the order in which they are tried: the one that was used last, then the others.

        Without turns of the policy, all spellings are the same, and only one is yielded.
        """
        yield self.last_spelling
        if has_turns:
            yield from (spelling for spelling in Spelling if spelling is not self.last_spelling)


def spelled(message: Message, turn: SampledTurn, spelling: Spelling, chat: Chat) -> dict[str, Any]:
    """Return a message of the policy in one of the spellings."""
    if spelling is Spelling.SAMPLED:
        return {"role": "assistant", "content": turn.text}
    if spelling is Spelling.OPENED:
        return {"role": "assistant", "content": chat.opening_of_turn + turn.text}
    # Copy only the fields that the policy wrote. Control tokens in its messages are trusted, so a field that the agent
    # added could forge a turn
    structured = {"role": "assistant", "content": message.get("content")}
    if message.get("tool_calls"):
        structured["tool_calls"] = message["tool_calls"]
    if turn.thought is not None:
        structured["reasoning_content"] = turn.thought
        if spelling is Spelling.RENAMED:
            structured |= dict.fromkeys(THOUGHT_FIELDS, turn.thought)
    return structured


def message_key(message: Message, *, with_thought: bool = False) -> str:
    """Return a key that identifies a message of the policy, even if a client has added fields to it."""
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = call.get("function", {})
            arguments = _canonical(function.get("arguments"))
            calls.append([call.get("id"), function.get("name"), arguments])
    thought = message.get("reasoning_content") if with_thought else None
    return json.dumps([message.get("content") or "", calls, thought])


def _canonical(arguments: Any) -> Any:
    """Return the arguments of a call in a form that stays the same if a client parses them and writes them again.

    Clients in JavaScript, for example, write no spaces, and 1 for 1.0.

    >>> _canonical('{"a": 1.0}') == _canonical('{"a":1}')
    True
    """
    value = arguments
    if isinstance(arguments, str):
        # Parsing the arguments of all calls in a large request could take seconds
        if len(arguments) > MAX_CANONICAL_CHARACTERS:
            return arguments
        try:
            value = parse_json(arguments)
        except ValueError:
            return arguments
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    """Return a JSON value, with each whole number as an int: 1.0 becomes 1."""
    if isinstance(value, dict):
        return {name: _with_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
