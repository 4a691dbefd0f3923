"""Grammars of typed answers: what they accept under different formats and thoughts, and how requests get them."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest
from agent_endpoint import CALL, MESSAGES, TOOL, Server
from chat_templates import MODEL
from grammars_here import GrammarsHere, accepts
from scripted_play import OneSession, run
from transformers import AutoTokenizer

from async_grpo.environments import grammars as module
from async_grpo.environments.call_formats import HARMONY_CHANNEL
from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.chat import Chat
from async_grpo.environments.grammars import OutputGrammars, Thought, thought_before_answer
from async_grpo.environments.processes import EnvironmentFailed
from async_grpo.environments.typed_output import TypedOutput
from async_grpo.errors import RequestRefused, WorkerLost
from async_grpo.types import Sampling

SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
ANSWER = TypedOutput(schema=json.dumps(SCHEMA))
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
ADDED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def here():
    with pytest.MonkeyPatch.context() as patch:
        process = GrammarsHere(None, "", {"model_path": str(MODEL)})
        patch.setattr(module, "GrammarProcess", lambda *_, **__: process)
        yield process


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def grammars(tool_parser: str = "hermes", template: str | None = None, **options: Any) -> OutputGrammars:
    own = AutoTokenizer.from_pretrained(MODEL)
    own.chat_template = template or own.chat_template
    make_reader = partial(CallReader, model_path=str(MODEL), tool_parser=tool_parser, **options)
    return Chat(own, make_reader=make_reader).grammars


@pytest.mark.parametrize(
    ("typed", "tools", "prompt", "accepted", "refused"),
    [
        (
            ANSWER,
            None,
            "",
            ['{"sum": 4}', '{\n  "sum": -4\n}'],
            ['{"sum": "4"}', "{}", '{"sum": 4} so', "so"],
        ),
        (TypedOutput(schema='{"type": "object"}'), None, "", ['{"a": [1, null]}', "{}"], ["[1]", "4"]),
        (ANSWER, None, "<think>\n", ['2 and 2</think>\n\n{"sum": 4}'], ['{"sum": 4}', "2</think>4"]),
        (ANSWER, None, "<think>\n\n</think>\n\n", ['{"sum": 4}'], ['2</think>{"sum": 4}']),
        (ANSWER, [ADD], "", ['{"sum": 4}', ADDED, f"{ADDED}{ADDED}"], ["{}", "<tool_call>"]),
        (
            TypedOutput(required_tools=("add",)),
            [ADD],
            "",
            [ADDED, f"{ADDED}{ADDED}"],
            ['{"sum": 4}', f"so {ADDED}", ADDED.replace("add", "sub"), ADDED.replace("1", '"1"')],
        ),
        (
            TypedOutput(required_tools=("add",), has_one_call=True),
            [ADD, TOOL | {"function": {"name": "sub"}}],
            "<think>",
            [f"hm</think>{ADDED}"],
            [f"hm</think>{ADDED}{ADDED}", "hm</think>" + ADDED.replace("add", "sub")],
        ),
    ],
)
def test_a_grammar_accepts_what_the_request_requires(
    here, tokenizer, typed, tools, prompt, accepted, refused
):
    grammar = run(grammars().grammar_of(typed, tools, prompt))
    for text in accepted:
        assert accepts(tokenizer, grammar, text), text
    for text in refused:
        assert not accepts(tokenizer, grammar, text), text


def test_white_space_has_a_limit_in_answers_and_in_arguments(here, tokenizer):
    answer = run(grammars().grammar_of(ANSWER, None, ""))
    call = run(grammars().grammar_of(TypedOutput(required_tools=("add",)), [ADD], ""))
    for num_spaces, is_accepted in ((40, True), (41, False)):
        space = " " * num_spaces
        assert accepts(tokenizer, answer, f'{{"sum":{space}4}}') is is_accepted
        assert accepts(tokenizer, call, ADDED.replace('"a": 1', f'"a":{space}1')) is is_accepted


def test_a_model_that_may_think_may_do_so_before_its_answer(here, tokenizer):
    grammar = run(grammars(template="{{ '<think>' }}").grammar_of(ANSWER, None, "assistant\n"))
    for text in ('{"sum": 4}', '<think>\n2 and 2\n</think>\n\n{"sum": 4}'):
        assert accepts(tokenizer, grammar, text), text
    assert not accepts(tokenizer, grammar, '<think>2 and 2 {"sum": 4}')


@pytest.mark.parametrize(
    ("prompt", "template", "thought"),
    [
        ("assistant\n", "", Thought()),
        ("assistant\n<think>\n", "<think>", Thought(end="</think>")),
        ("assistant\n<think>\n\n</think>\n\n", "<think>", Thought()),
        ("assistant\n", "x<think>y</think>", Thought("<think>", "</think>")),
        ("[/INST]", "[THINK]", Thought("[THINK]", "[/THINK]")),
    ],
)
def test_whether_a_thought_may_come_first_depends_on_prompt_and_template(prompt, template, thought):
    assert thought_before_answer(prompt, template) == thought


def deeply_nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, 'xgrammar refuses it: Unsupported type "nonsense"'),
        ({"type": "string", "pattern": "((("}, "The parenthesis is not closed"),
        ({"$ref": "#/$defs/missing"}, "Cannot find field $defs"),
        (
            {"items": {"$ref": "https://example.com/x"}},
            "refers to another document or to an anchor, 'https://example.com/x'",
        ),
        ({"type": "integer", "multipleOf": 3}, "the schema: multipleOf cannot be enforced"),
        ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "allOf with several schemas cannot be enforced"),
        (deeply_nested(64), "the schema is nested too deeply"),  # of 65 levels
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason_and_the_way_out(here, schema, reason):
    with pytest.raises(RequestRefused) as refusal:
        run(grammars().grammar_of(TypedOutput(schema=json.dumps(schema)), None, ""))
    assert reason in str(refusal.value) and "--typed-output hint" in str(refusal.value)


def test_the_deepest_schema_that_is_allowed_has_a_grammar_and_a_deeper_tool_has_none(here):
    deepest = json.dumps(deeply_nested(63))
    assert run(grammars().grammar_of(TypedOutput(schema=deepest), None, ""))
    parameters = {"type": "object", "properties": {"a": deeply_nested(100)}}
    tool = TOOL | {"function": {"name": "sub", "parameters": parameters}}
    with pytest.raises(RequestRefused, match="the grammar is nested too deeply"):
        run(grammars().grammar_of(TypedOutput(required_tools=("sub",)), [tool], ""))


@pytest.mark.parametrize(
    ("made", "typed", "reason"),
    [
        (
            partial(grammars, "none"),
            TypedOutput(required_tools=("add",)),
            "calls stay text (--tool-parser none)",
        ),
        (partial(grammars, "granite"), TypedOutput(required_tools=("add",)), "in the format granite"),
        (partial(grammars, template=HARMONY_CHANNEL), ANSWER, "gpt-oss, whose answers stand between"),
        (partial(grammars, reasoning_parser="deepseek_r1"), ANSWER, "not known where the thought"),
    ],
)
def test_a_family_whose_form_is_not_known_is_refused_by_name(here, made, typed, reason):
    with pytest.raises(RequestRefused) as refusal:
        run(made().grammar_of(typed, [ADD], ""))
    assert reason in str(refusal.value)


def test_a_grammar_is_made_once(here):
    async def story():
        chat_grammars = grammars()
        before = here.num_asked
        for_all = [chat_grammars.grammar_of(ANSWER, None, "") for _ in range(3)]
        assert len(set(await asyncio.gather(*for_all))) == 1 and here.num_asked == before + 1
        await chat_grammars.grammar_of(ANSWER, None, "<think>")
        assert here.num_asked == before + 2

    run(story())


def test_a_grammar_that_took_too_long_once_is_made_when_it_is_asked_for_again(here, monkeypatch):
    async def takes_too_long(*_: Any, **__: Any) -> dict[str, Any]:
        raise EnvironmentFailed("no answer within 20 s")

    chat_grammars = grammars()

    async def story():
        with monkeypatch.context() as busy:
            busy.setattr(here, "ask", takes_too_long)
            with pytest.raises(RequestRefused, match="no answer within 20 s"):
                await chat_grammars.grammar_of(ANSWER, None, "")
        assert json.loads(await chat_grammars.grammar_of(ANSWER, None, ""))

    run(story())


class Typed(OneSession):
    """A policy that keeps the sampling settings of its turns, or refuses them."""

    def __init__(self, says, error: Exception | None = None) -> None:
        super().__init__(says)
        self.sampling: list[Sampling] = []
        self._error = error

    async def generate(self, prompt, count, sampling=None, session=None):
        self.sampling.append(sampling)
        if self._error is not None:
            raise self._error
        async for completion in super().generate(prompt, count, sampling, session):
            yield completion


async def ask(server: Server, **fields: Any) -> tuple[int, dict]:
    server.policies[0].recorder.chat.reader.model_path = str(MODEL)
    return await server.ask(server.keys[0], "chat/completions", MESSAGES | fields)


def test_the_engine_gets_the_grammar_and_the_agent_the_json(here, tokenizer):
    async def story():
        generation = Typed(lambda: '{"sum": 4}')
        async with Server(generation=generation) as server:
            status, answer = await ask(server, response_format=FORMAT)
            assert status == 200
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": '{"sum": 4}'}
            assert answer["choices"][0]["finish_reason"] == "stop"
            await ask(server)
        return generation.sampling

    typed, plain = run(story())
    assert accepts(tokenizer, typed.grammar, '{"sum": 4}') and plain.grammar == ""


@pytest.mark.parametrize(
    ("choice", "finish_reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "add"}}, "stop")],
)
def test_a_required_call_reaches_the_agent_as_a_call(here, choice, finish_reason):
    async def story():
        async with Server(generation=Typed(lambda: CALL)) as server:
            status, answer = await ask(server, tools=[ADD], tool_choice=choice)
            assert status == 200
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
            assert answer["choices"][0]["finish_reason"] == finish_reason

    run(story())


def test_a_refused_schema_costs_the_request_alone_and_a_lost_engine_the_run(here):
    async def story():
        async with Server(generation=Typed(lambda: "{}", RequestRefused("no such grammar"))) as server:
            status, answer = await ask(server, response_format=FORMAT)
            assert status == 400 and answer["error"]["message"] == "no such grammar"
            schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
            status, answer = await ask(server, response_format=schema)
            assert status == 400 and "Unsupported type" in answer["error"]["message"]
            assert server.policies[0].failure is None and server.policies[0].recorder.num_turns == 0
        async with Server(generation=Typed(lambda: "{}", WorkerLost("gone"))) as server:
            assert (await ask(server, response_format=FORMAT))[0] == 503
            assert isinstance(server.policies[0].failure, WorkerLost)

    run(story())


def test_a_process_that_dies_over_a_schema_costs_the_request_and_serves_the_next(monkeypatch):
    class Dying:
        """A process that dies over the first schema."""

        asked = 0

        async def start(self):
            pass

        async def ask(self, *_, **__):
            self.asked += 1
            if self.asked == 1:
                raise EnvironmentFailed("the process died: signal 11")
            return {"grammar": "{}"}

        async def close(self):
            pass

    dying = Dying()
    monkeypatch.setattr(module, "GrammarProcess", lambda *_, **__: dying)

    async def story():
        chat_grammars = grammars()
        with pytest.raises(RequestRefused, match="signal 11; simplify it"):
            await chat_grammars.grammar_of(ANSWER, None, "")
        assert await chat_grammars.grammar_of(TypedOutput(schema="{}"), None, "") == "{}"

    run(story())
