"""JSON nested deeply, of a request, an environment or the policy, is refused by name or stays text."""

import json

import pytest
from agent_endpoint import answers_of
from chat_templates import chat_of

from async_grpo.environments.call_formats import read_hermes
from async_grpo.errors import ConfigurationError

DEPTHS = (100, 200, 450, 500, 700, 900, 990, 1_000)


def nested(depth: int) -> dict:
    """Return an object of that many objects in each other."""
    value: dict = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def nested_text(depth: int) -> str:
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


def with_arguments(arguments: object) -> dict:
    function = {"name": "add", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def deep_bodies(depth: int) -> tuple[str, ...]:
    """Return requests that are nested so deeply in their tools, in a field of a message, and in arguments."""
    deep = nested_text(depth)
    tool = f'{{"type": "function", "function": {{"name": "add", "parameters": {deep}}}}}'
    user = '{"role": "user", "content": "a"}'
    arguments = json.dumps(with_arguments("DEEP")).replace('"DEEP"', deep)
    return (
        f'{{"messages": [{user}], "tools": [{tool}]}}',
        f'{{"messages": [{{"role": "user", "content": "a", "extra": {deep}}}]}}',
        f'{{"messages": [{user}, {arguments}, {user}]}}',
    )


def test_a_body_nested_deeper_than_a_hundred_is_refused_and_is_no_fault_of_ours(caplog):
    bodies = [body for depth in DEPTHS for body in deep_bodies(depth)]
    answers = answers_of(*((body.encode(), "chat/completions", {}) for body in bodies))
    assert len(answers) == 3 * len(DEPTHS)
    for status, answer in answers:
        assert status == 400 and "nested deeper than 100" in answer["error"]["message"]
    assert not caplog.records


def test_arguments_as_text_that_is_nested_deeply_stay_text(caplog):
    requests = []
    for depth in DEPTHS:
        conversation = [{"role": "user", "content": "a"}, with_arguments(nested_text(depth))]
        result = {"role": "tool", "tool_call_id": "1", "content": "b"}
        body = json.dumps({"messages": [*conversation, result]})
        requests.append((body.encode(), "chat/completions", {}))
    answers = answers_of(*requests)
    assert [status for status, _ in answers] == [200] * len(DEPTHS) and not caplog.records


@pytest.mark.parametrize("depth", DEPTHS)
def test_deep_messages_and_tools_of_an_environment_are_rendered_or_refused_by_name(depth):
    deep = nested(depth)
    tool = {"type": "function", "function": {"name": "add", "parameters": deep}}
    user = {"role": "user", "content": "a"}
    cases = (
        ([user], [tool]),
        ([{**user, "extra": deep}], None),
        ([user, with_arguments(deep), user], None),
        ([user, with_arguments(nested_text(depth)), user], [tool]),
    )
    chat = chat_of("writes_calls_as_json")
    for messages, tools in cases:
        try:
            chat.render_foreign(messages, tools)
        except ConfigurationError as error:
            assert "nested too deeply" in str(error) or "the chat template refuses" in str(error)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_call_of_the_policy_that_is_nested_deeply_stays_text_unless_others_can_read_it(depth):
    text = f'<tool_call>{{"name": "add", "arguments": {nested_text(depth - 1)}}}</tool_call>'
    turn = read_hermes(text)
    if depth <= 100:
        assert json.loads(turn.calls[0].arguments) == nested(depth - 1)
    else:
        assert not turn.calls and turn.content == text
