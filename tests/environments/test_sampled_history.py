"""The policy's turns are found again in an agent's messages, and what a template leaves out is noticed."""

import pytest

from async_grpo.environments.sampled_history import SampledHistory, SampledTurn, Spelling, spelled
from async_grpo.experience.template_turns import lost_roles

FIRST = SampledTurn(0, "<think>a</think>yes", "a")
SECOND = SampledTurn(1, "<think>b</think>yes", "b")
USER = {"role": "user", "content": "go on"}


def said(thought: str | None = None, **further) -> dict:
    message = {"role": "assistant", "content": "yes"} | further
    return message if thought is None else message | {"reasoning_content": thought}


def history() -> SampledHistory:
    both = SampledHistory()
    both.add(said("a"), FIRST)
    both.add(said("b"), SECOND)
    return both


@pytest.mark.parametrize(
    "messages, expected",
    [
        ([USER, said("a"), USER, said("b")], {1: FIRST, 3: SECOND}),
        ([USER, said("b"), USER, said("a")], {1: SECOND, 3: FIRST}),
        # Without thoughts, equal messages are those that were said last
        ([USER, said(), USER, said()], {1: FIRST, 3: SECOND}),
        ([USER, said()], {1: SECOND}),
        ([USER, said("")], {1: SECOND}),
        # Fields that a client adds change nothing
        ([USER, said("a", name="policy")], {1: FIRST}),
        # Neighbours: an edited thought, another text, another role
        ([USER, said("a, or so")], {}),
        ([USER, said("a", content="no")], {}),
        ([said("a", role="user")], {}),
    ],
)
def test_a_message_is_the_turn_of_which_it_was_made(messages, expected):
    assert history().turns_of(messages) == expected


@pytest.mark.parametrize(
    ("sampled", "sent", "is_found"),
    [
        ('{"b": 1, "a": [2]}', '{"a":[2],"b":1}', True),
        ('{"a": 1.0}', '{"a":1}', True),
        ('{"a": 1}', '{"a": 2}', False),
        ("{no json", "{no json", True),
        ("{no json", "{no  json", False),
        ("[" * 100_000, "[" * 100_000, True),
        ("[" * 100_000 + "]" * 100_000, "[" * 100_000 + "]" * 100_000, True),
    ],
)
def test_a_call_is_the_policy_s_in_every_spelling_of_its_arguments(sampled, sent, is_found):
    def called(arguments: str) -> dict:
        function = {"name": "add", "arguments": arguments}
        return said(tool_calls=[{"id": "c00000000", "type": "function", "function": function}])

    turns = SampledHistory()
    turns.add(called(sampled), FIRST)
    assert turns.turns_of([USER, called(sent)]) == ({1: FIRST} if is_found else {})


def test_a_structured_message_has_the_policy_s_own_fields_alone():
    message = spelled(said("", name="<|im_end|>"), FIRST, Spelling.STRUCTURED, None)
    assert message == {"role": "assistant", "content": "yes", "reasoning_content": "a"}
    message = spelled(said("", name="<|im_end|>"), FIRST, Spelling.RENAMED, None)
    thoughts = dict.fromkeys(("reasoning_content", "thinking", "tool_plan"), "a")
    assert message == {"role": "assistant", "content": "yes", **thoughts}


@pytest.mark.parametrize(
    "text, contents, lost",
    [
        ("one two three", ["one", "two", "three"], []),
        ("three two one", ["one", "two", "three"], []),
        ("one\n two", ["one two "], []),
        (r'{"result": "a \"b\""}', ['a "b"'], []),
        ("one three", ["one", "two", "three"], ["tool"]),
        ("", ["one", ""], ["tool"]),
    ],
)
def test_roles_are_lost_whose_texts_are_not_in_what_the_template_wrote(text, contents, lost):
    assert lost_roles(text, [{"role": "tool", "content": content} for content in contents]) == lost


def call(arguments: str) -> list[dict]:
    return [{"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": arguments}}]


@pytest.mark.parametrize(
    "arguments, is_same",
    [
        ('{"a": 1, "b": [1.0, "é"]}', True),
        ('{"a":1,"b":[1,"é"]}', True),
        ('{"b": [1, "\\u00e9"], "a": 1}', True),
        ('{"a": 1, "b": [1.5, "é"]}', False),
        ('{"a": "1", "b": [1, "é"]}', False),
        ('{"a": 1, "b": [1, "é"]', False),
        ("", False),
        ("[" * 100_000, False),
        ('{"a": Infinity, "b": [1, "é"]}', False),
    ],
)
def test_a_call_whose_arguments_a_client_wrote_anew_is_the_policy_s(arguments, is_same):
    turns = SampledHistory()
    turns.add(said(tool_calls=call('{"a": 1, "b": [1.0, "é"]}')), FIRST)
    assert (turns.turns_of([said(tool_calls=call(arguments))]) == {0: FIRST}) is is_same
