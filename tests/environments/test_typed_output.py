"""Requests that require a form of the answer: how they are read, and what the policy is told with --typed-output hint."""

import json

import pytest
from agent_endpoint import MESSAGES, TOOL, Server
from scripted_play import run

from async_grpo.environments.typed_output import (
    MAX_SCHEMA_CHARACTERS,
    JsonObject,
    JsonSchema,
    NamedTool,
    TypedOutput,
    typed_output_of,
    with_instruction,
)

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
NAMED = {"type": "function", "function": {"name": "add"}}


def test_a_schema_is_required_as_it_was_sent_with_or_without_name_and_strict():
    for fields in (
        {"schema": SCHEMA},
        {"name": "a", "schema": SCHEMA, "strict": None, "description": "the sum"},
    ):
        typed = typed_output_of(
            JsonSchema.model_validate({"type": "json_schema", "json_schema": fields}), "auto", None
        )
        assert json.loads(typed.schema) == SCHEMA
        assert typed.description == fields.get("description", "")
        assert typed.required_tools == ()


def test_a_required_call_comes_before_the_response_format():
    typed = typed_output_of(JsonObject(type="json_object"), "required", [TOOL], parallel_tool_calls=False)
    assert typed == TypedOutput(required_tools=("add",), has_one_call=True)


def test_a_named_tool_is_called_once_and_required_ones_as_often_as_the_policy_likes():
    named = typed_output_of(None, NamedTool.model_validate(NAMED), [TOOL])
    assert named == TypedOutput(required_tools=("add",), has_one_call=True)
    assert typed_output_of(None, "required", [TOOL]) == TypedOutput(required_tools=("add",))


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_request_without_a_form_leaves_the_policy_free(choice):
    assert typed_output_of(None, choice, [TOOL]) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required"}, "tool_choice: a call is required, and `tools` has no function"),
        ({"tool_choice": NAMED}, "tool_choice: `tools` has no function 'add'"),
        ({"tool_choice": "any"}, "tool_choice: Input should be 'auto', 'none' or 'required'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: Field required ('auto', 'none'"),
        ({"response_format": {"type": "xml"}}, "response_format: the type 'xml' is not supported"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema.json_schema: Field required",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}}},
            f"at most {MAX_SCHEMA_CHARACTERS} are allowed",
        ),
        (
            {"guided_json": SCHEMA},
            "guided_json: only JSON schemas can be required of answers: use `response_format`",
        ),
    ],
)
def test_a_form_that_cannot_be_required_is_refused_with_the_field_and_the_reason(fields, reason):
    async def story():
        async with Server() as server:
            status, answer = await server.ask(server.keys[0], "chat/completions", MESSAGES | fields)
            assert status == 400 and reason in answer["error"]["message"], answer
            assert server.policies[0].failure is None

    run(story())


def test_the_instruction_joins_the_system_message_or_becomes_one():
    question = {"role": "user", "content": "2 + 2?"}
    system = {"role": "system", "content": "Be brief."}
    joined = {"role": "system", "content": "Be brief.\n\nIn JSON."}
    assert with_instruction([system, question], "In JSON.") == [joined, question]
    assert with_instruction([question], "In JSON.", "Be brief.") == [joined, question]
    assert with_instruction([question], "In JSON.") == [{"role": "system", "content": "In JSON."}, question]


def test_with_hints_the_policy_is_told_the_schema_and_a_badly_formed_answer_is_an_answer():
    async def story():
        async with Server() as server:
            server.policies[0].recorder.chat.typed_output = "hint"
            status, answer = await server.ask(
                server.keys[0], "chat/completions", MESSAGES | {"response_format": FORMAT}
            )
            assert status == 200 and answer["choices"][0]["message"]["content"] == "hm"
            return server.policies[0].trajectory(reward=0.0)

    completion = run(story())
    assert not completion.failure
    told = completion.turns[0].before_text
    assert "Answer with JSON that fits this JSON schema, and with nothing before or after it" in told
    assert json.dumps(SCHEMA) in told


def test_with_hints_the_policy_is_told_which_tool_to_call_and_need_not():
    async def story():
        async with Server() as server:
            server.policies[0].recorder.chat.typed_output = "hint"
            fields = {"tools": [TOOL], "tool_choice": NAMED}
            status, answer = await server.ask(server.keys[0], "chat/completions", MESSAGES | fields)
            assert status == 200 and "tool_calls" not in answer["choices"][0]["message"]
            return server.policies[0].trajectory(reward=0.0)

    assert "Your next message must be one call of the tool add." in run(story()).turns[0].before_text
