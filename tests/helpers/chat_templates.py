"""Chat templates with the habits of well-known ones, and random conversations in them."""

import asyncio
import random
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.types import Completion, FinishReason, Prompt

MODEL = Path(__file__).parents[2] / "sample-data" / "tiny-model"
TURN = "<|im_start|>{{ m['role'] }}\n{{ text }}<|im_end|>\n"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _chat(text: str, begin: str = "") -> str:
    return begin + "{% for m in messages %}{% set text = " + text + " %}" + TURN + "{% endfor %}" + ASKS


CALLS = (
    "{% if tools %}<|im_start|>system\ntools: {{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}\n<tool_call>\n"
    '{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{{ call['function']['arguments'] | tojson }}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}" + ASKS
)
# The last user's place decides which thoughts are dropped, as in Qwen3
FORGETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set text = m['content'] or '' %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}" + TURN + "{% endfor %}" + ASKS
)
# System text has no turn of its own: it stands in the first user's, as in Gemma
MERGES = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}{% for m in messages %}"
    "{% if m['role'] != 'system' %}"
    "{% set text = (system + '\\n' if system and loop.index0 == 1 else '') + (m['content'] or '') %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + ASKS
)
TEMPLATES = {
    "appends": _chat("m['content'] or ''"),
    "forgets_thoughts": FORGETS,
    "trims": _chat("(m['content'] or '') | trim"),
    "writes_calls_as_json": CALLS,
    "merges_system": MERGES,
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a + b", "parameters": {}}}]


def chat_of(template: str) -> Chat:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = TEMPLATES[template]
    # Most of these templates do not show tools
    return Chat(tokenizer, make_reader=partial(CallReader, tool_parser="hermes"))


class Talkative:
    """A `Generation` that says random things, and keeps what it was asked after and what it sampled."""

    def __init__(self, chat: Chat, dice: random.Random) -> None:
        self._chat, self._dice = chat, dice
        self.requests: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # seen, sampled, versions

    def _words(self) -> str:
        return "".join(self._dice.choices("ab 1\n\té✓🙂<>{}", k=self._dice.randrange(12)))

    def _says(self) -> str:
        thought = f"<think>{self._words()}</think>\n\n" if self._dice.random() < 0.4 else ""
        calls = [
            f'<tool_call>{space}{{"name": "add", "arguments": {{"a":{space}{self._dice.randrange(9)}}}}}\n</tool_call>'
            for space in self._dice.choices(["", " ", "\n"], k=self._dice.choice([0, 0, 1, 2]))
        ]
        broken = "<tool_call>{no json</tool_call>" if self._dice.random() < 0.05 else ""
        return thought + self._words() + "\n".join(calls) + broken

    async def generate(self, prompt, count, sampling=None, session=None) -> AsyncGenerator[Completion]:
        assert count == 1 and session is not None
        text, dice = self._says(), self._dice
        ids = self._chat.encode(text)
        if dice.random() < 0.1:  # cut, perhaps in the middle of a character
            ids, reason = ids[: dice.randrange(len(ids) + 1)], FinishReason.LENGTH
            ids = ids if len(ids) else self._chat.encode("x")
            told = self._chat.decode(ids, ids[:0])
        else:
            ids, reason, told = np.append(ids, self._chat.encode("<|im_end|>")), FinishReason.STOP, text
        ids = ids.astype(np.int32)
        versions = np.full(len(ids), session.turn, np.int32)
        session.turn += 1
        self.requests.append((prompt.token_ids.copy(), ids, versions))
        yield Completion(ids, np.linspace(-1, 0, len(ids), dtype=np.float32), versions, reason, told)


def _sampled(messages: list[dict], raw: list[tuple[dict, str]]) -> list[dict]:
    """Return messages with what was sampled in their place, the last of equal ones with what was sampled last."""
    sampled = list(messages)
    left = list(raw)
    for index in reversed(range(len(messages))):
        found = [place for place, (handed_out, _) in enumerate(left) if handed_out == messages[index]]
        if found:
            sampled[index] = {"role": "assistant", "content": left[found[-1]][1]}
            if len(found) > 1:
                del left[found[-1]]
    return sampled


def check_seen(generation: Talkative, messages: list[dict], raw: list, tools: list | None) -> None:
    """The engine saw the conversation as the template writes it, with what was sampled or with its structure."""
    chat = generation._chat
    seen = chat.decode(generation.requests[-1][0], np.empty(0, np.int32))
    if "\ufffd" not in seen:  # cut in the middle of a character
        expected = [chat.render(_sampled(messages, raw), tools)]
        if messages[-1]["role"] != "assistant":
            expected.append(chat.render(messages, tools))
        assert seen in expected


async def converse(chat: Chat, dice: random.Random) -> tuple[Talkative, Completion, Prompt]:
    """A client talks with the policy: users, tools, thoughts; it sometimes tries again, or tidies what it was told."""
    generation = Talkative(chat, dice)
    prompt = Prompt(0, np.empty(0, np.int32), {"input": ""})
    policy = TrajectoryClient(
        generation, TrajectoryRecorder(chat), prompt, 0, TrajectoryLimits(100, 10**6, None, 60)
    )
    messages = [{"role": "user", "content": generation._words()}]
    raw: list[tuple[dict, str]] = []  # what was handed out, and what was sampled for it
    if dice.random() < 0.5:
        messages.insert(0, {"role": "system", "content": "be brief"})
    tools = TOOLS if dice.random() < 0.5 else None
    for _ in range(dice.randint(1, 8)):
        reply = await policy.complete(messages, tools=tools)
        check_seen(generation, messages, raw, tools)
        raw.append((reply.message, reply.text))
        said = dict(reply.message)
        if dice.random() < 0.1 and said["content"]:
            said["content"] = said["content"].strip()
        if dice.random() < 0.1 and len(messages) > 3:  # it tries another way
            del messages[-2:]
            continue
        messages.append(said)
        for call in said.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": generation._words()})
        if messages[-1]["role"] == "assistant" or dice.random() < 0.2:
            messages.append({"role": "user", "content": generation._words()})
    return generation, policy.trajectory(1.0), prompt


def conversation(template: str, seed: int) -> tuple[Talkative, Completion, Prompt]:
    return asyncio.run(converse(chat_of(template), random.Random(seed)))
