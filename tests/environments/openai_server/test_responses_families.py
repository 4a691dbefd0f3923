"""Under public chat templates, a conversation of the Responses API has the same tokens as one of chat completions."""

import json

import numpy as np
import pytest
from model_families import (
    ANSWER,
    FROM_MODEL_CARDS,
    QUESTION,
    TEMPLATES,
    THANKS,
    TOOLS,
    WITHOUT_TOOLS,
    ParserHere,
    as_thought,
    family_chat,
    native_turn,
    needs_templates,
    talk,
)
from scripted_play import run

from async_grpo.environments import call_reader
from async_grpo.environments.chat import Chat
from async_grpo.environments.openai_server.responses_answer import response_of
from async_grpo.environments.openai_server.responses_request import ResponsesRequest, messages_of_input
from async_grpo.environments.trajectory_client import Reply

pytestmark = needs_templates

WITH_TOOLS = sorted({path.stem for path in TEMPLATES.glob("*.jinja")} - set(WITHOUT_TOOLS))
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(autouse=True)
def parsers_in_this_process(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(call_reader, "ParserProcess", ParserHere)


def turns_of(chat: Chat, name: str) -> list[str]:
    """Return three turns of the policy: a call of a tool, and two answers."""
    question = chat.prompts.whole_text([QUESTION], TOOLS, begins_turn=True)
    answer = as_thought(chat, question, "It is sunny.")
    return [native_turn(chat) or FROM_MODEL_CARDS[name], answer, answer]


async def inputs_of_chat(chat: Chat, texts: list[str]) -> tuple[list[np.ndarray], int]:
    policy, client = talk(chat, texts)
    messages = [QUESTION]
    reply = await client.complete(messages, tools=TOOLS)
    (call,) = reply.message["tool_calls"]
    answer = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": ANSWER}
    messages += [reply.message, answer]
    reply = await client.complete(messages, tools=TOOLS)
    await client.complete([*messages, reply.message, THANKS], tools=TOOLS)
    return policy.inputs, client.recorder.num_rewritten


async def inputs_of_responses(
    chat: Chat, texts: list[str], sends_thoughts: bool
) -> tuple[list[np.ndarray], int]:
    policy, client = talk(chat, texts)
    items: list[dict] = [QUESTION]

    async def ask() -> Reply:
        # As it travels over HTTP
        body = json.loads(json.dumps({"input": items, "tools": FLAT_TOOLS}))
        request = ResponsesRequest.model_validate(body)
        reply = await client.complete(messages_of_input(request.input), tools=request.chat_tools())
        output = response_of(request, f"1f2e{len(policy.inputs)}", reply)["output"]
        items.extend(item for item in output if sends_thoughts or item["type"] != "reasoning")
        return reply

    await ask()
    assert items[-1]["type"] == "function_call"
    items.append({"type": "function_call_output", "call_id": items[-1]["call_id"], "output": ANSWER})
    await ask()
    items.append(THANKS)
    await ask()
    return policy.inputs, client.recorder.num_rewritten


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_the_policy_reads_the_same_tokens_over_both_apis(name, tmp_path):
    chat = family_chat(name, tmp_path)
    texts = turns_of(chat, name)
    expected_inputs, expected_rewritten = run(inputs_of_chat(chat, texts))
    for sends_thoughts in (True, False):
        inputs, rewritten = run(inputs_of_responses(chat, texts, sends_thoughts))
        assert rewritten == expected_rewritten
        for ids, expected in zip(inputs, expected_inputs, strict=True):
            np.testing.assert_array_equal(ids, expected)
