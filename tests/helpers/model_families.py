"""Public chat templates of model families, which lie beside a checkout, each on the tiny model's tokenizer."""

import re
import shutil
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import MODEL
from host_here import HostHere
from reported_inputs import REPORTS
from transformers import AutoTokenizer

from async_grpo.environments.call_formats import THOUGHT_TAGS, split_thought
from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.errors import ConfigurationError
from async_grpo.experience.template_turns import _common_beginning
from async_grpo.inference.tool_parsers import ToolParserHost
from async_grpo.types import Completion, FinishReason, Prompt

TEMPLATES = REPORTS.parent / "chat_templates"
needs_templates = pytest.mark.skipif(not TEMPLATES.exists(), reason=f"{TEMPLATES} is not here")
# Control tokens that the families' tokenizers have and their templates do not write
FURTHER_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "<|tool_call|>"]
FURTHER_TOKENS += [f"<|tool_call{part}|>" for part in ("s_section_begin", "s_section_end", "_begin", "_end")]
FURTHER_TOKENS += ["<|tool_call_argument_begin|>"]
SPELLINGS = re.compile(r"<[|｜]?[^<>\s'\"{}%]{1,40}>|\[/?[A-Z_]{3,}\]")
# How a family ends its turn. The engine's tokens of the end follow the turn, and are not part of its text
ENDS = (
    "<|im_end|> <|eot_id|> <|eot|> <|end|> <|call|> <|END_OF_TURN_TOKEN|> <|tool_response> [e~[ [|endofturn|] </s>"
).split()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Paris", "days": 3}
CALL = {
    "id": "aBcDeFgH1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
QUESTION = {"role": "user", "content": "How is the weather in Paris?"}
ANSWER = "sunny, 25 degrees"
THANKS = {"role": "user", "content": "Thank you so much!"}

# Templates that do not show tools to the policy
WITHOUT_TOOLS = """
    ax_deepseek_v3 ax_gemma3n ax_mistral_v7_tekken ax_phi_4 cohere2 deepseek_r1_distill deepseekv3 ds31 gemma2 gemma3
    llama3 phi3_5 r1_official smollm3
""".split()
# The calls of Granite 3.3 and Kimi are those of their model cards, because their templates do not write any (Kimi's newer
# ones append to lists, which transformers' sandbox refuses)
FROM_MODEL_CARDS = {
    "granite33": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
    **dict.fromkeys(
        ("kimi_k2", "kimi_k2i", "kimi_thinking"),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    ),
}


class ParserHere(HostHere):
    """A `ParserProcess` without a process."""

    host_class = ToolParserHost


def family_chat(name: str, folder: Path, **options: Any) -> Chat:
    """Return the chat of a family, whose tokenizer is written into the folder."""
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = template
    tokenizer.bos_token = "<bos>"
    tokenizer.add_tokens(sorted({*SPELLINGS.findall(template), *FURTHER_TOKENS}), special_tokens=True)
    tokenizer.save_pretrained(folder)
    shutil.copy(MODEL / "config.json", folder)
    return Chat(tokenizer, make_reader=partial(CallReader, model_path=str(folder), **options))


def native_turn(chat: Chat) -> str:
    """Return a turn with `CALL` as the family's template writes it, behind a thought if its prompt opens one."""
    question = chat.prompts.whole_text([QUESTION], TOOLS, begins_turn=True)
    native = ""
    for content in ("", None):
        message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        try:
            whole = chat.prompts.whole_text([QUESTION, message], TOOLS)
        except ConfigurationError:
            continue
        if CALL["function"]["name"] in whole[_common_beginning(question, whole) :]:
            native = whole[_common_beginning(question, whole) :]
            break
    native = native.rstrip()
    for end in ENDS:
        if native.endswith(end):
            native = native.removesuffix(end)
            break
    return as_thought(chat, question, split_thought(native, THOUGHT_TAGS)[1]) if native else ""


def as_thought(chat: Chat, question: str, text: str) -> str:
    """Return a text behind the end of the thought that the prompt opened, if it did."""
    opened = [end for begin, end in THOUGHT_TAGS if question.rstrip().endswith(begin)]
    return f"I ask.\n{opened[0]}\n\n{text}" if opened else text


class Scripted:
    """A policy that says the given texts."""

    def __init__(self, chat: Chat, texts: list[str]) -> None:
        self.inputs: list[np.ndarray] = []
        self._chat = chat
        self._texts = list(texts)

    async def generate(self, prompt, count, sampling=None, session=None) -> AsyncGenerator[Completion]:
        text = self._texts.pop(0)
        ids = self._chat.encode(text)
        self.inputs.append(prompt.token_ids)
        logprobs = np.zeros(len(ids), np.float32)
        yield Completion(ids, logprobs, np.zeros(len(ids), np.int32), FinishReason.STOP, text)


def talk(chat: Chat, texts: list[str]) -> tuple[Scripted, TrajectoryClient]:
    """Return a policy that says the texts, and the client of its trajectory."""
    policy = Scripted(chat, texts)
    prompt = Prompt(0, np.empty(0, np.int32), {"input": ""})
    limits = TrajectoryLimits(100, 10**6, None, 60)
    return policy, TrajectoryClient(policy, TrajectoryRecorder(chat), prompt, 0, limits)
