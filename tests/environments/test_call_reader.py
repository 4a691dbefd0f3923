"""The process of vLLM's parsers: what is chosen, refused, too slow, dead."""

import json
from typing import ClassVar

import pytest
from model_families import CALL, QUESTION, TOOLS, family_chat, native_turn, needs_templates, talk
from scripted_play import run

from async_grpo.environments import call_reader
from async_grpo.environments.call_formats import FunctionCall, ReadTurn
from async_grpo.environments.processes import EnvironmentFailed
from async_grpo.errors import ConfigurationError

pytestmark = needs_templates
TEXT = "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"


class FakeParsers:
    """A `ParserProcess` that gives scripted answers, and keeps what it was asked."""

    answers: ClassVar[list] = []

    def __init__(self, source, name, options, **_) -> None:
        self.options = options
        self.asked: list = []
        self.num_starts = 0

    async def start(self) -> None:
        self.num_starts += 1

    async def ask(self, call, _, *arguments, timeout_s):
        self.asked.append((call, *arguments))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        pass


@pytest.fixture
def answers(monkeypatch):
    monkeypatch.setattr(call_reader, "ParserProcess", FakeParsers)
    monkeypatch.setattr(FakeParsers, "answers", [])
    return FakeParsers.answers


def test_the_preferred_one_of_the_parsers_that_read_the_probes_is_chosen_once(answers, tmp_path):
    reader = family_chat("qwen3_coder", tmp_path).reader
    answers.append({"names": ["seed_oss", "qwen3_coder", "step3p5"]})
    assert run(reader.call_format()) == "qwen3_coder"
    assert not answers
    assert run(reader.call_format()) == "qwen3_coder"
    answers.append({"thought": None, "content": "", "calls": []})
    run(reader.read(TEXT, "", TOOLS))
    assert reader._process.asked[-1] == ("read", "qwen3_coder", None, TEXT, TOOLS)


def test_parsers_that_read_one_call_are_taken_if_none_reads_two(answers, tmp_path):
    reader = family_chat("ax_llama4", tmp_path).reader
    answers += [{"names": []}, {"names": ["llama4_json"]}]
    assert run(reader.call_format()) == "llama4_json"


def test_a_format_that_no_parser_reads_ends_the_run_and_shows_the_call(answers, tmp_path):
    policy, client = talk(family_chat("qwen3_coder", tmp_path), [])
    answers += [{"names": []}, {"names": []}]
    with pytest.raises(ConfigurationError, match="<function=add_numbers>.*none of vLLM's tool parsers reads"):
        run(client.complete([QUESTION], tools=TOOLS))
    assert client.failure is not None and not policy.inputs


@pytest.mark.parametrize("problem", ["no answer within 20 s", "the process died"])
def test_a_turn_that_the_parser_cannot_read_counts_as_text_and_is_said_once(
    answers, tmp_path, caplog, problem
):
    chat = family_chat("qwen3_coder", tmp_path, tool_parser="qwen3_coder")
    _, client = talk(chat, [TEXT, TEXT])
    answers += [EnvironmentFailed(problem), EnvironmentFailed(problem)]

    async def twice():
        return [await client.complete([QUESTION], tools=TOOLS) for _ in range(2)]

    assert [reply.message for reply in run(twice())] == 2 * [{"role": "assistant", "content": TEXT}]
    assert chat.reader.num_unread == 2
    assert len([record for record in caplog.records if problem in record.message]) == 1


def test_without_tools_nothing_is_searched_for_calls_and_no_parser_is_chosen(answers, tmp_path):
    _, client = talk(family_chat("qwen3_coder", tmp_path), [TEXT])
    assert run(client.complete([QUESTION])).message == {"role": "assistant", "content": TEXT}


@pytest.mark.parametrize(
    "text, ids",
    [
        ('[TOOL_CALLS]add[CALL_ID]aBcDeFgH1[ARGS]{"a": 1}', ["aBcDeFgH1"]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "aBcDeFgH1"}]', ["aBcDeFgH1"]),
        # Neighbours: no id, one that Mistral's templates refuse, and fewer ids than calls
        ('[TOOL_CALLS][{"name": "add", "arguments": {}}]', [None]),
        ('[TOOL_CALLS][{"name": "add", "arguments": {}, "id": "functions.add:0"}]', [None]),
        ("[TOOL_CALLS]add[CALL_ID]aBcDeFgH1[ARGS]{}[TOOL_CALLS]add[ARGS]{}", [None, None]),
    ],
)
def test_ids_that_the_policy_wrote_itself_are_kept(text, ids):
    turn = ReadTurn(None, "", len(ids) * (FunctionCall("add", "{}"),))
    assert [call.id for call in call_reader._with_sampled_ids(turn, text).calls] == ids


def test_the_real_process_reads_calls_and_thoughts_and_refuses_unknown_names(tmp_path):
    pytest.importorskip("vllm")
    chat = family_chat("qwen3_coder", tmp_path / "a", reasoning_parser="qwen3")
    _, client = talk(chat, [f"I ask.\n</think>\n\n{native_turn(chat)}"])

    async def story():
        try:
            reply = await client.complete([QUESTION], tools=TOOLS)
            for option in ("tool_parser", "reasoning_parser"):
                reader = family_chat("qwen3_coder", tmp_path / option, **{option: "hermess"}).reader
                reader._process = (
                    chat.reader._process
                )  # of the same tokenizer; a start takes 6 s of the processor
                refusal = f"--{option.replace('_', '-')} 'hermess' is unknown"
                with pytest.raises(ConfigurationError, match=refusal):
                    await reader.start()
            return reply
        finally:
            await chat.reader.close()

    message = run(story()).message
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == CALL["function"]["arguments"]
    assert message["reasoning_content"].strip() == "I ask."
