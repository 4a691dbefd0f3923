"""Random conversations under public chat templates: calls, answers of tools, exactness, and rewritten histories.

    python -m tests.long.template_conversations                     # 233 conversations under each template, some minutes
    python -m tests.long.template_conversations --only qwen3,gptoss --count 50

The policy writes in the format of its family: what it says is what the chat template writes for a message with thought,
text and calls, with the token that ends the turn. The client is a program as it comes: it sends back each message as it
received it, with or without `reasoning_content`, and the answers of its tools. Of every turn the program checks that

- the calls are recognized, with their arguments,
- the client receives the thought and the text apart, without control tokens,
- the answers of tools are in the prompt after them,
- what is trained on is what the engine read and sampled, token by token,
- no conversation is refused that the template renders from the client's messages alone.
"""

import asyncio
import json
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from model_families import (
    ENDS,
    FROM_MODEL_CARDS,
    TEMPLATES,
    TOOLS,
    WITHOUT_TOOLS,
    ParserHere,
    family_chat,
)
from token_exactness import check

from async_grpo.environments import call_reader
from async_grpo.environments.call_formats import THOUGHT_TAGS
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.errors import ConfigurationError
from async_grpo.experience.template_turns import _common_beginning
from async_grpo.types import Completion, FinishReason, Prompt

ALL_ENDS = [*ENDS, "<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|end_of_text|>"]
WORDS = 'Paris Oslo rain sun 25 é ✓ "quoted" a\nline {x} [y] 100% so-so'.split(" ")


@dataclass
class Result:
    """What became of the conversations under one template."""

    template: str
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, kind: str, detail: object) -> None:
        self.counts[kind] += 1
        self.faults.append(f"{self.template}: {kind}: {str(detail)[:600]}")


@dataclass
class NativeTurn:
    """A turn of the policy in the format of its family: the text, and the token that ends it."""

    text: str
    end: str
    message: dict[str, Any] = field(
        default_factory=dict
    )  # the message for which the template writes the turn


class Family:
    """The format of one family: what its policy says after a conversation."""

    def __init__(self, name: str, chat: Chat) -> None:
        self.has_tools = name not in WITHOUT_TOOLS
        self.call_from_card = FROM_MODEL_CARDS.get(name)
        self._chat = chat

    def call(self, dice: random.Random) -> dict[str, Any]:
        """Return a call with random arguments."""
        arguments = {"city": " ".join(dice.choices(WORDS, k=2)), "days": dice.randrange(1, 9)}
        if self.call_from_card:
            arguments = {"city": "Paris", "days": 3}
        call_id = "".join(dice.choices("abcdefghijkmnpqrstuvwxyz23456789", k=9))
        return {
            "id": call_id,
            "type": "function",
            "function": {"name": "get_weather", "arguments": arguments},
        }

    def turn(self, messages: list, tools: Any, text: str, thought: str, calls: list) -> NativeTurn | None:
        """Return the turn that the template writes after the messages; None if it does not write such a turn."""
        prompt = self._chat.prompts.whole_text(messages, tools, begins_turn=True)
        opened_end = ""
        for begin, end in THOUGHT_TAGS:
            if prompt.rstrip().endswith(begin):
                opened_end = end
        if calls and self.call_from_card:
            message = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
            native = NativeTurn(self.call_from_card, "", message)
        else:
            native = self._written(prompt, messages, tools, text, thought, calls)
            if native is None and thought:
                native = self._written(prompt, messages, tools, text, "", calls)
        if native and opened_end and opened_end not in native.text:
            native.text = f"{thought}\n{opened_end}\n\n{native.text}"
            native.message["reasoning_content"] = thought
        return native

    def _written(
        self, prompt: str, messages: list, tools: Any, text: str, thought: str, calls: list
    ) -> NativeTurn | None:
        for content in (text, text or None):
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if thought:
                message["reasoning_content"] = thought
            if calls:
                message["tool_calls"] = calls
            try:
                whole = self._chat.prompts.whole_text([*messages, message], tools)
            except ConfigurationError:
                continue
            turn = whole[_common_beginning(prompt, whole) :].rstrip()
            has_all = text.strip() in turn and thought in turn and turn.count("get_weather") >= len(calls)
            if not has_all:
                continue
            # Some templates write the end of the prompt otherwise if a turn follows
            opening = prompt.rstrip()[-7:]
            is_rewritten = _common_beginning(prompt, whole) < len(prompt) - 15
            if is_rewritten and opening in turn:
                turn = turn.rpartition(opening)[2].lstrip()
            places = [(turn.find(end), end) for end in ALL_ENDS if turn.find(end) > 0]
            if places and not calls:
                place, end = min(places)
                return NativeTurn(turn[:place], end, message)
            for end in ALL_ENDS:
                if turn.endswith(end):
                    return NativeTurn(turn.removesuffix(end), end, message)
            return NativeTurn(turn, "", message)
        return None


class NativePolicy:
    """A `Generation` that says the turns that it is given."""

    def __init__(self, chat: Chat) -> None:
        self.requests: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # read, sampled, versions
        self.next_turn = NativeTurn("", "")
        self._chat = chat

    async def generate(self, prompt, count, sampling=None, session=None):
        text = self.next_turn.text
        ids = self._chat.encode(text + self.next_turn.end)
        versions = np.full(len(ids), session.turn, np.int32)
        session.turn += 1
        self.requests.append((prompt.token_ids.copy(), ids, versions))
        yield Completion(
            ids, np.linspace(-1, 0, len(ids), dtype=np.float32), versions, FinishReason.STOP, text
        )


class Reference:
    """The conversation as messages whose parts are known, because the policy's turns were made of them.

    The template needs a new sequence where it does not write these messages as they were said.

    Attributes:
        messages: The conversation.
        num_sequences: Number of sequences that the template needs.
    """

    def __init__(self, chat: Chat, messages: list[dict[str, Any]], tools: Any) -> None:
        self.messages = list(messages)
        self.num_sequences = 0
        self._chat = chat
        self._tools = tools
        self._text = "no text begins with this"

    def add(self, turn: NativeTurn, message: dict[str, Any]) -> None:
        """Add a turn of the policy, whose calls have the ids that the client received."""
        prompt = self._chat.render(self.messages, self._tools)
        self.num_sequences += not prompt.startswith(self._text)
        self._text = prompt + turn.text + turn.end
        known = dict(turn.message)
        if known.get("tool_calls"):
            known["tool_calls"] = message.get("tool_calls") or known["tool_calls"]
        self.messages.append(known)


async def converse(family: Family, chat: Chat, seed: int, result: Result) -> None:
    """Play one conversation, and add what became of it."""
    dice = random.Random(seed)
    policy = NativePolicy(chat)
    prompt = Prompt(0, np.empty(0, np.int32), {"input": ""})
    limits = TrajectoryLimits(100, 10**6, None, 600)
    client = TrajectoryClient(policy, TrajectoryRecorder(chat), prompt, 0, limits)
    messages: list[dict[str, Any]] = [{"role": "user", "content": _words(dice)}]
    if dice.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "Be brief."})
    tools = TOOLS if family.has_tools and dice.random() < 0.8 else None
    sends_thoughts = dice.random() < 0.5
    answers: list[str] = []
    reference = Reference(chat, messages, tools)
    for _ in range(dice.randint(2, 6)):
        num_calls = dice.choice([0, 1, 1, 2]) if tools else 0
        calls = [family.call(dice) for _ in range(num_calls)]
        thought = f"Thought {dice.randrange(10**6)} {_words(dice)}" if dice.random() < 0.6 else ""
        text = "" if calls else _words(dice)
        try:
            turn = family.turn(reference.messages, tools, text, thought, calls)
            if turn is None and len(calls) > 1:
                calls = calls[:1]
                turn = family.turn(reference.messages, tools, text, thought, calls)
        except ConfigurationError:
            result.counts["refused by the template"] += 1
            return
        if turn is None:
            result.counts["unwritten turns"] += 1
            return
        if calls and family.call_from_card:
            calls = calls[:1]
        policy.next_turn = turn
        try:
            reply = await client.complete(messages, tools=tools)
        except ConfigurationError as error:
            result.fault("refused", error)
            return
        result.counts["turns"] += 1
        _check_turn(chat, policy, reply.message, calls, answers, result)
        reference.add(turn, reply.message)
        num_before = len(messages)
        said = dict(reply.message)
        if not sends_thoughts:
            said.pop("reasoning_content", None)
        messages.append(said)
        for call in said.get("tool_calls") or ():
            answers.append(f"answer {dice.randrange(10**6)} {_words(dice)}")
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": answers[-1]}
            )
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": f"{dice.randrange(10**6)} {_words(dice)}"})
            answers.append(messages[-1]["content"])
        reference.messages += messages[num_before + 1 :]
    try:
        num_sequences = check(policy, client.trajectory(1.0), prompt)
    except AssertionError as error:
        result.fault("inexact", f"seed {seed}: {error}")
        return
    result.counts["conversations"] += 1
    result.counts["sequences"] += num_sequences
    result.counts["needed sequences"] += reference.num_sequences
    result.counts["tokens"] += sum(_length_of(sequence) for sequence in [policy.requests[-1]])
    result.counts["trained tokens"] += _tokens_of(client)


def _check_turn(chat, policy, message, calls, answers, result: Result) -> None:
    """Check that the turn's calls were recognized, and that the engine read what users and tools had answered."""
    result.counts["calls"] += len(calls)
    recognized = []
    for call in message.get("tool_calls") or ():
        recognized.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
    expected = [("get_weather", call["function"]["arguments"]) for call in calls]
    if recognized != expected:
        result.fault("calls not recognized", f"{expected} in {policy.next_turn.text!r}: {message}")
    known = policy.next_turn.message
    if not calls and (message["content"] or "").strip() != known["content"].strip():
        result.fault("texts not separated", f"{policy.next_turn.text!r}: {message}")
    thought = (known.get("reasoning_content") or "").strip()
    if (message.get("reasoning_content") or "").strip() != thought:
        result.fault("texts not separated", f"thought {thought!r} in {policy.next_turn.text!r}: {message}")
    read = chat.decode(policy.requests[-1][0], np.empty(0, np.int32))
    squeezed = "".join(read.split())
    for answer in answers:
        result.counts["answers"] += 1
        in_json = json.dumps(answer, ensure_ascii=False)[1:-1]
        if not any("".join(text.split()) in squeezed for text in (answer, in_json, json.dumps(answer)[1:-1])):
            result.fault("answers not read", f"{answer!r} in {read!r}")


def _length_of(request: tuple[np.ndarray, np.ndarray, np.ndarray]) -> int:
    return len(request[0]) + len(request[1])


def _tokens_of(client: TrajectoryClient) -> int:
    return sum(len(sequence.token_ids) for sequence in client.recorder._sequences)


def _words(dice: random.Random) -> str:
    return " ".join(dice.choices(WORDS, k=dice.randint(1, 6)))


async def _try_template(name: str, count: int) -> Result:
    result = Result(name)
    with tempfile.TemporaryDirectory() as folder:
        chat = family_chat(name, Path(folder))
        family = Family(name, chat)
        for seed in range(count):
            await converse(family, chat, seed, result)
    return result


FAULTS = ["calls not recognized", "answers not read", "texts not separated", "refused", "inexact"]
COLUMNS = ["turns", "calls", "answers", *FAULTS]


def main(
    only: Annotated[str, typer.Option(help="Templates, with commas between them; all by default.")] = "",
    count: Annotated[int, typer.Option(help="Number of conversations under each template.")] = 233,
    faults: Annotated[int, typer.Option(help="Number of faults that are printed for each template.")] = 3,
) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    call_reader.ParserProcess = ParserHere  # type: ignore[misc]
    names = only.split(",") if only else sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    total: Counter[str] = Counter()
    print("| template | conversations | " + " | ".join(COLUMNS) + " | sequences | needed |")
    print("|---" * (len(COLUMNS) + 4) + "|")
    for name in names:
        result = asyncio.run(_try_template(name, count))
        counts = result.counts
        total += counts
        cells = [name, counts["conversations"], *(counts[column] for column in COLUMNS)]
        for kind in ("sequences", "needed sequences"):
            cells.append(f"{counts[kind] / max(1, counts['conversations']):.2f}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        for fault in result.faults[:faults]:
            print(fault, file=sys.stderr, flush=True)
    print(dict(total), file=sys.stderr)
    raise SystemExit(any(total[kind] for kind in FAULTS))


if __name__ == "__main__":
    typer.run(main)
