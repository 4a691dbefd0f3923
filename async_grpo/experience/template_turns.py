"""Find out what a chat template writes for a turn of the policy: its beginning, and the spelling of tool calls."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.experience.row_messages import Message

QUESTION = {"role": "user", "content": "Please add 17 and 25 for Eve."}
PROBE_CONTENT = "It is 42."
PROBE_THOUGHT = "17 and 25 are 42."
CONTROL_TOKEN = re.compile(r"<[|｜][^<>]{1,60}>")
# The tool call that probes contain. Its arguments are a text and a number, because some formats spell the two differently
CALL_NAME = "add_numbers"
CALL_ARGUMENTS = {"person": "Eve", "count": 17}
CALL_ID = "a1b2c3d4e"
SECOND_CALL_ID = "f5g6h7i8j"
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": CALL_NAME,
            "description": "Add numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "person": {"type": "string", "description": "Who asks."},
                    "count": {"type": "integer", "description": "How many."},
                },
                "required": ["person", "count"],
            },
        },
    }
]
_CALL = {
    "id": CALL_ID,
    "type": "function",
    "function": {"name": CALL_NAME, "arguments": CALL_ARGUMENTS},
}
# Contents that probes try for a message with calls, because templates expect different ones
_CONTENTS = ("", None, "I add.")
_CONTROL_BEGINNINGS = "<["
MAX_CONTROL_CHARACTERS = 40  # upper bound of the number of characters of a control token


@dataclass(frozen=True)
class CallSpelling:
    """How a chat template writes tools and tool calls, found out by rendering a probe.

    Attributes:
        shows_tools: Whether the prompt depends on the tools.
        text: What the template writes for a turn with a call of `CALL_NAME`, after the beginning of the turn; "" if it
            does not write the call.
        text_of_two: What the template writes for a turn with this call twice; "" if it does not write both calls.
        refusal: The template's own words if it refuses a conversation with tools or with a call; otherwise "".
    """

    shows_tools: bool
    text: str
    text_of_two: str = ""
    refusal: str = ""


def call_spelling(prompts: PromptRenderer) -> CallSpelling:
    """Find out how the chat template treats tools, by rendering a conversation with one call."""
    question = ""
    without_tools = ""
    try:
        question = prompts.whole_text([QUESTION], PROBE_TOOLS, begins_turn=True)
        without_tools = prompts.whole_text([QUESTION], None, begins_turn=True)
    except ConfigurationError as error:
        # Some templates cannot be used without tools
        if not question:
            return CallSpelling(False, "", refusal=str(error))
    shows_tools = question != without_tools
    refusal = ""
    for content in _CONTENTS:
        texts = []
        for calls in ([_CALL], [_CALL, _CALL | {"id": SECOND_CALL_ID}]):
            message = {"role": "assistant", "content": content, "tool_calls": calls}
            try:
                whole = prompts.whole_text([QUESTION, message], PROBE_TOOLS)
            except ConfigurationError as error:
                refusal = str(error)
                continue
            turn = whole[_common_beginning(question, whole) :]
            if turn.count(CALL_NAME) >= len(calls):
                texts.append(turn)
        if texts:
            return CallSpelling(shows_tools, *texts)
    return CallSpelling(shows_tools, "", refusal=refusal)


def opening_of_turn(prompts: PromptRenderer, begin_tags: Sequence[str]) -> str:
    """Return the text that a template adds to the prompt for a turn, but not to a finished turn, such as `<think>`.

    Args:
        prompts: The chat template.
        begin_tags: Tags that begin a thought. If the prompt ends with one, the text begins with it.

    Raises:
        ConfigurationError: The template refuses a question and its answer.
    """
    question = prompts.whole_text([QUESTION], None, begins_turn=True)
    for tag in begin_tags:
        if question.rstrip().endswith(tag):
            return question[question.rindex(tag) :]
    answer = {"role": "assistant", "content": PROBE_CONTENT}
    whole = prompts.whole_text([QUESTION, answer], None)
    return question[_common_beginning(question, whole) :]


@dataclass(frozen=True)
class TurnFrame:
    """The texts that a chat template writes around the thought and the content of a turn.

    The policy samples these texts, too, so they are found in sampled turns.

    Attributes:
        before_thought: The text before the thought; "" if it is not known.
        after_thought: The text between the thought and the content.
        before_content: The text before the content of a turn without a thought; "" if there is none, or if the prompt
            already ends with it.
        after_content: Texts that may end the turn, the longest first. The first one is what the template writes. The
            others are beginnings of it, because the engine stops at one of its control tokens.
    """

    before_thought: str = ""
    after_thought: str = ""
    before_content: str = ""
    after_content: tuple[str, ...] = ()

    def split(self, text: str) -> tuple[str | None, str] | None:
        """Divide a turn into its thought (None if there is none) and the rest.

        Return None if the text contains none of the texts of this frame.

        >>> frame = TurnFrame("to=self:", "<end>to=user:", "to=user:", ("<eot>",))
        >>> frame.split("to=self:2 + 2<end>to=user:4<eot>")
        ('2 + 2', '4')
        >>> frame.split("4") is None
        True
        """
        if self.before_thought and text.startswith(self.before_thought):
            thought, end, content = text.removeprefix(self.before_thought).partition(self.after_thought)
            if end:
                return thought, self._without_end(content)
            # Without a content, a control token ends the thought, and a call may follow it
            control_token = CONTROL_TOKEN.match(self.after_thought)
            if control_token is None:
                return thought, ""
            thought, _, call = thought.partition(control_token.group())
            return thought, call
        if not text.startswith(self.before_content):
            return None
        content = self._without_end(text.removeprefix(self.before_content))
        return None if content == text else (None, content)

    def _without_end(self, content: str) -> str:
        for end in self.after_content:
            if content.endswith(end):
                return content.removesuffix(end)
        return content


def turn_frame(prompts: PromptRenderer, thought_tags: Sequence[str]) -> TurnFrame:
    """Find out what the chat template writes around a thought and a content, by rendering an answer with both.

    Args:
        prompts: The chat template.
        thought_tags: Tags such as `<think>`, whose thoughts are found without a frame. If the frame would contain one of
            these tags, an empty frame is returned.

    Raises:
        ConfigurationError: The template refuses a question and its answer.
    """
    question = prompts.whole_text([QUESTION], None, begins_turn=True)
    answer = {"role": "assistant", "content": PROBE_CONTENT}
    turn = _turn_after(question, prompts.whole_text([QUESTION, answer], None))
    before_content, content, after_content = turn.partition(PROBE_CONTENT)
    has_tags = any(tag in turn for tag in thought_tags)
    control_tokens = CONTROL_TOKEN.findall(after_content)
    # If there is only a single control token after the content, it ends the turn, and the sampled text does not have it
    has_frame = before_content.strip() or len(control_tokens) > 1
    if not content or not has_frame or has_tags:
        return TurnFrame()
    ends = ["".join(control_tokens[:count]) for count in range(len(control_tokens), 0, -1)]
    frame = TurnFrame(before_content=before_content, after_content=tuple(ends))
    with_thought = answer | {"reasoning_content": PROBE_THOUGHT, "thinking": PROBE_THOUGHT}
    turn = _turn_after(question, prompts.whole_text([QUESTION, with_thought], None))
    before_thought, thought, rest = turn.partition(PROBE_THOUGHT)
    after_thought, content, _ = rest.partition(PROBE_CONTENT)
    if thought and content and before_thought and after_thought:
        frame = replace(frame, before_thought=before_thought, after_thought=after_thought)
    return frame


def _turn_after(question: str, whole: str) -> str:
    return whole[_common_beginning(question, whole) :]


def _common_beginning(text: str, second_text: str) -> int:
    """Return the length of the common beginning of two texts. The beginning does not end within a control token."""
    length = 0
    for character, other_character in zip(text, second_text, strict=False):
        if character != other_character:
            break
        length += 1
    if length == min(len(text), len(second_text)):
        return length
    # The texts may differ only within a control token: <think> and <tool_call> both begin with <t
    for place in range(length - 1, max(0, length - MAX_CONTROL_CHARACTERS) - 1, -1):
        if text[place].isspace() or text[place] in ">]":
            break
        if text[place] in _CONTROL_BEGINNINGS:
            return place
    return length


def lost_roles(text: str, messages: Sequence[Message]) -> list[str]:
    """Return the roles of messages whose content a rendered text does not contain.

    White space is not compared, because templates trim it. Contents are also found in the form of JSON texts. If the
    template writes the messages in their order, the search takes time proportional to the length of the text.
    """
    squeezed = _squeezed(text)
    roles = []
    end = 0  # where the last message that was found ends. Most templates write messages in their order
    for message in messages:
        content = message.get("content")
        if not isinstance(content, str):
            continue
        for spelling in (_squeezed(content), _squeezed(_in_json(content))):
            begin = squeezed.find(spelling, end)
            if begin < 0:
                begin = squeezed.find(spelling)
            if begin >= 0:
                end = begin + len(spelling)
                break
        else:
            roles.append(str(message.get("role")))
    return roles


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _in_json(text: str) -> str:
    """Return a text as it stands within a JSON text."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
