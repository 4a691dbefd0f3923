"""Native tool calls of public model families are recognized, and what tools answer is in the next prompt."""

import json

import numpy as np
import pytest
from grammars_here import GrammarsHere, accepts
from model_families import (
    ANSWER,
    ARGUMENTS,
    FROM_MODEL_CARDS,
    QUESTION,
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
from transformers import AutoTokenizer

from async_grpo.environments import call_reader, grammars
from async_grpo.environments.typed_output import TypedOutput
from async_grpo.errors import ConfigurationError, RequestRefused

pytestmark = needs_templates

# Template -> the parser that is chosen
PARSERS = {
    "ax_command_a_tool_use": "cohere_command3",
    "ax_exaone4": "hermes",
    "ax_llama4": "llama3_json",
    "ax_mistral_v3_tekken": "mistral",
    "devstral": "mistral",
    "gemma4_it": "gemma4",
    "gemma4_v5": "gemma4",
    "glm46": "glm45",
    "glm4moe": "glm45",
    "gptoss": "openai",
    "gptoss_official": "openai",
    "granite33": "granite",
    "hermes3": "hermes",
    "kimi_k2": "kimi_k2",
    "kimi_k2i": "kimi_k2",
    "kimi_thinking": "kimi_k2",
    "lfm2_2_5": "lfm2",
    "llama33": "llama3_json",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "minimax_m2": "minimax_m2",
    "ministral3": "mistral",
    "mistral_nemo": "mistral",
    "mistral_small32": "mistral",
    "muse_glimmer": "muse_glimmer",
    "nemotron_3_nano": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "qwen3_coder": "qwen3_coder",
    "qwen3_instruct_2507": "hermes",
    "qwq": "hermes",
}


@pytest.fixture(autouse=True)
def parsers_in_this_process(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setattr(call_reader, "ParserProcess", ParserHere)


def test_every_template_is_in_one_of_the_tables():
    from model_families import TEMPLATES

    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == {*PARSERS, *WITHOUT_TOOLS}


@pytest.mark.parametrize("name", PARSERS)
def test_a_native_call_is_recognized_and_the_answer_of_its_tool_is_read_by_the_policy(name, tmp_path):
    chat = family_chat(name, tmp_path)
    native = native_turn(chat) or FROM_MODEL_CARDS[name]
    question = chat.prompts.whole_text([QUESTION], TOOLS, begins_turn=True)
    last = as_thought(chat, question, "It is sunny.")
    policy, client = talk(chat, [native, last, last])

    async def story():
        messages = [QUESTION]
        reply = await client.complete(messages, tools=TOOLS)
        (call,) = reply.message["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS
        assert len(call["id"]) == 9 and call["id"].isalnum()
        answer = {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": ANSWER}
        messages += [reply.message, answer]
        reply = await client.complete(messages, tools=TOOLS)
        assert not reply.message.get("tool_calls")
        assert ANSWER in chat.decode(policy.inputs[1], np.empty(0, np.int32))
        messages += [reply.message, THANKS]
        await client.complete(messages, tools=TOOLS)
        text = chat.decode(policy.inputs[2], np.empty(0, np.int32))
        assert THANKS["content"] in text and ANSWER in text

    run(story())
    assert chat.reader.num_unread == 0


@pytest.mark.parametrize("name", PARSERS)
def test_the_parser_of_a_family_is_chosen_by_its_template(name, tmp_path):
    assert run(family_chat(name, tmp_path).reader.call_format()) == PARSERS[name]


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_template_that_does_not_show_tools_ends_the_run_at_the_first_request_with_tools(name, tmp_path):
    policy, client = talk(family_chat(name, tmp_path), ["hm"])
    with pytest.raises(ConfigurationError, match="does not show them to the policy.*--tool-parser none"):
        run(client.complete([QUESTION], tools=TOOLS))
    assert client.failure is not None and not policy.inputs


@pytest.mark.parametrize("name", ["deepseekv3", "ds31"])
def test_a_parser_that_the_user_names_is_used_with_a_template_that_does_not_show_tools(name, tmp_path):
    parser = {"deepseekv3": "deepseek_v3", "ds31": "deepseek_v31"}[name]
    chat = family_chat(name, tmp_path, tool_parser=parser)
    _, client = talk(chat, [native_turn(chat)])
    reply = run(client.complete([QUESTION], tools=TOOLS))
    assert [call["function"]["name"] for call in reply.message["tool_calls"]] == ["get_weather"]


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4_v5", "gptoss", "mistral_nemo", "minimax_m2"])
def test_with_tool_parser_none_a_call_stays_text(name, tmp_path):
    chat = family_chat(name, tmp_path, tool_parser="none")
    native = native_turn(chat) or FROM_MODEL_CARDS[name]
    _, client = talk(chat, [native])
    reply = run(client.complete([QUESTION], tools=TOOLS))
    assert "tool_calls" not in reply.message and "get_weather" in reply.message["content"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm46", "minimax_m2"])
def test_a_call_inside_a_thought_is_none(name, tmp_path):
    chat = family_chat(name, tmp_path)
    native = split_at_thought(native_turn(chat))
    opens = chat.opening_of_turn.strip() == "<think>"
    _, client = talk(chat, [("" if opens else "<think>") + native + "</think>It is sunny."])
    reply = run(client.complete([QUESTION], tools=TOOLS))
    assert "tool_calls" not in reply.message and reply.message["content"] == "It is sunny."
    assert "get_weather" in reply.message["reasoning_content"]


def split_at_thought(native: str) -> str:
    return native.rpartition("</think>")[2]


def test_a_history_that_the_agent_rewrote_still_has_the_answers_of_tools(tmp_path):
    """Gemma 4 writes the answer of a tool only after a message with calls, so the structure must stay."""
    chat = family_chat("gemma4_v5", tmp_path)
    policy, client = talk(chat, [native_turn(chat), "It is sunny.", "You are welcome."])

    async def story():
        messages = [QUESTION]
        reply = await client.complete(messages, tools=TOOLS)
        call_id = reply.message["tool_calls"][0]["id"]
        answer = {"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": ANSWER}
        messages += [reply.message, answer]
        reply = await client.complete(messages, tools=TOOLS)
        messages[0] = {"role": "user", "content": "The weather in Paris?"}
        await client.complete([*messages, reply.message, THANKS], tools=TOOLS)

    run(story())
    assert client.recorder.num_rewritten == 1
    text = chat.decode(policy.inputs[2], np.empty(0, np.int32))
    assert ANSWER in text and "The weather in Paris?" in text and THANKS["content"] in text


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cohere2", "It is sunny.<|END_RESPONSE|>"),
        ("gptoss", "<|channel|>final<|message|>It is sunny.<|return|>"),
        (
            "gptoss",
            "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant<|channel|>final<|message|>It is sunny.",
        ),
        ("muse_glimmer", " to=user<|message|>It is sunny."),
        ("muse_glimmer", " to=self<|message|>I ask.<|eom|><|start|>assistant to=user<|message|>It is sunny."),
        ("ax_command_a_tool_use", "<|START_RESPONSE|>It is sunny.<|END_RESPONSE|>"),
        # Neighbours, which have no frame: nothing is taken away
        ("llama3", "It is sunny."),
        ("ax_gemma3n", "It is sunny."),
    ],
)
def test_what_a_family_writes_around_thought_and_text_does_not_reach_the_client(name, said, tmp_path):
    chat = family_chat(name, tmp_path)
    policy, client = talk(chat, [said, said])

    async def story():
        reply = await client.complete([QUESTION])
        assert reply.message["content"] == "It is sunny."
        assert reply.message.get("reasoning_content") == ("I ask." if "I ask." in said else None)
        await client.complete([QUESTION, reply.message, THANKS])

    run(story())
    text = chat.decode(policy.inputs[1], np.empty(0, np.int32))
    assert text.count("It is sunny.") == 1 and THANKS["content"] in text


def test_two_calls_of_llama_in_a_row_are_both_recognized(tmp_path):
    two = '{"name": "get_weather", "parameters": {"city": "Oslo"}}{"name": "get_weather", "parameters": {"city": "}{"}}'
    _, client = talk(family_chat("ax_llama4", tmp_path), [two])
    reply = run(client.complete([QUESTION], tools=TOOLS))
    calls = reply.message["tool_calls"]
    assert [json.loads(call["function"]["arguments"])["city"] for call in calls] == ["Oslo", "}{"]


@pytest.mark.parametrize("name", ["gptoss", "gptoss_official"])
def test_a_thought_before_a_call_stays_in_the_history_of_gpt_oss(name, tmp_path):
    """These templates read thoughts from the field `thinking`, and leave out `reasoning_content`."""
    chat = family_chat(name, tmp_path)
    thought = "<|channel|>analysis<|message|>I ask.<|end|><|start|>assistant"
    calls = [thought + native_turn(chat)] * 2
    policy, client = talk(chat, [*calls, "It is sunny."])

    async def story():
        messages = [QUESTION]
        known = np.empty(0, np.int32)
        for _ in range(3):
            reply = await client.complete(messages, tools=TOOLS)
            np.testing.assert_array_equal(policy.inputs[-1][: len(known)], known)
            known = np.concatenate([policy.inputs[-1], reply.completion.token_ids])
            messages.append(reply.message)
            for call in reply.message.get("tool_calls", ()):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": ANSWER})

    run(story())
    assert client.recorder.num_rewritten == 0


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_coder", "qwen3_5_think", "llama3_1", "kimi_k2", "glm46", "minimax_m2", "hermes3"]
)
def test_a_required_call_may_be_written_as_the_template_writes_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(grammars, "GrammarProcess", GrammarsHere)
    chat = family_chat(name, tmp_path)
    question = chat.prompts.whole_text([QUESTION], TOOLS, begins_turn=True)
    native = native_turn(chat) or FROM_MODEL_CARDS[name]
    typed = TypedOutput(required_tools=("get_weather",), has_one_call=True)
    grammar = run(chat.grammars.grammar_of(typed, TOOLS, question))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert accepts(tokenizer, grammar, native.rstrip())
    assert not accepts(tokenizer, grammar, native.rstrip() + native.rstrip())
    assert not accepts(tokenizer, grammar, native.rstrip().replace("get_weather", "get_news"))
    assert not accepts(tokenizer, grammar, as_thought(chat, question, "It is sunny."))


@pytest.mark.parametrize(
    "name", ["mistral_nemo", "granite33", "gemma4_it", "gptoss", "ax_command_a_tool_use"]
)
def test_a_family_whose_calls_cannot_be_required_is_refused_by_name(name, tmp_path, monkeypatch):
    monkeypatch.setattr(grammars, "GrammarProcess", GrammarsHere)
    chat = family_chat(name, tmp_path)
    with pytest.raises(RequestRefused, match=r"cannot be enforced.*--typed-output hint"):
        run(chat.grammars.grammar_of(TypedOutput(required_tools=("get_weather",)), TOOLS, ""))
