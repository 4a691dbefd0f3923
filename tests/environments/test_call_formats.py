"""Thoughts and calls are read in the formats of the families that this process reads itself; wrong ones stay text."""

import json

import pytest

from async_grpo.environments.call_formats import (
    THOUGHT_TAGS,
    FunctionCall,
    ReadTurn,
    read_command,
    read_harmony,
    read_hermes,
    split_thought,
)
from async_grpo.environments.chat import message_of

ADD = FunctionCall("add", '{"a": 1}')


@pytest.mark.parametrize(
    "text, is_open, expected",
    [
        ("<think>two</think>4", False, ("two", "4")),
        ("\n<think>\ntwo\n</think>\n\n4", False, ("two", "4")),
        ("two\n</think>\n4", True, ("two", "4")),
        ("two\n</think>\n4", False, ("two", "4")),
        ("<think>still thinking", False, ("still thinking", "")),
        ("still thinking", True, ("still thinking", "")),
        ("<think>I end with </think>, I think</think>4", False, ("I end with </think>, I think", "4")),
        ("[THINK]two[/THINK]4", False, ("two", "4")),
        ("<|START_THINKING|>two<|END_THINKING|>4", False, ("two", "4")),
        ("<|channel>thought\ntwo<channel|>4", False, ("two", "4")),
        # An empty thought is none
        ("<think>\n\n</think>\n\n4", False, (None, "4")),
        # Neighbours: no thought
        ("4", False, (None, "4")),
        ("  4\n", False, (None, "  4\n")),
        ("I would write <think> here", False, (None, "I would write <think> here")),
        ("", False, (None, "")),
    ],
)
def test_a_thought_is_what_stands_before_the_last_end_tag(text, is_open, expected):
    assert split_thought(text, THOUGHT_TAGS, is_open) == expected


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", [ADD]),
        ('<tool_call>\n{"name": "add", "parameters": {"a": 1}}\n</tool_call>', "", [ADD]),
        # Arguments as the JSON text of an object are decoded once
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
        ('a<tool_call>{"name": "add"}</tool_call>b', "ab", [FunctionCall("add", "{}")]),
        (2 * '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "", [ADD, ADD]),
        # Neighbours: what is no call stays text
        ('<tool_call>{"name": "add"</tool_call>', None, []),
        ('<tool_call>{"arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, []),
        ('<tool_call>{"name": "add", "arguments": "no JSON"}</tool_call>', None, []),
        ('{"name": "add", "arguments": {"a": 1}}', None, []),
        ("<tool_call>", None, []),
        ("four", None, []),
    ],
)
def test_calls_of_hermes(text, content, calls):
    assert read_hermes(text) == ReadTurn(None, text if content is None else content, tuple(calls))


ANALYSIS = "<|channel|>analysis<|message|>Let me add.<|end|>"
CALL = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'


@pytest.mark.parametrize(
    "text, expected",
    [
        (ANALYSIS + CALL, ReadTurn("Let me add.", "", (ADD,))),
        (
            ANALYSIS + "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
            '<|message|>{"a": 1}<|call|>',
            ReadTurn("Let me add.", "", (ADD,)),
        ),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', ReadTurn(None, "", (ADD,))),
        (
            ANALYSIS + "<|start|>assistant<|channel|>final<|message|>It is 4.<|return|>",
            ReadTurn("Let me add.", "It is 4."),
        ),
        (
            "<|channel|>commentary<|message|>I will add.<|end|>" + CALL,
            ReadTurn(None, "I will add.", (ADD,)),
        ),
        # Neighbours
        ("<|channel|>final<|message|>to=functions.add", ReadTurn(None, "to=functions.add")),
        ("It is 4.", ReadTurn(None, "It is 4.")),
        (" to=functions.add<|channel|>commentary json<|message|>no JSON<|call|>", None),
    ],
)
def test_calls_of_harmony(text, expected):
    assert read_harmony(text) == (ReadTurn(None, text) if expected is None else expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}\n]<|END_ACTION|>',
            ReadTurn(None, "", (ADD,)),
        ),
        ("<|START_RESPONSE|>It is 4.<|END_RESPONSE|>", ReadTurn(None, "It is 4.")),
        ("<|START_ACTION|>no JSON<|END_ACTION|>", None),
        ("<|START_ACTION|>[3]<|END_ACTION|>", None),
        ("It is 4.", None),
    ],
)
def test_calls_of_command(text, expected):
    assert read_command(text) == (ReadTurn(None, text) if expected is None else expected)


def test_a_message_has_the_thought_and_ids_of_nine_letters_and_digits_that_differ():
    turn = ReadTurn("Let me add.", " ", (ADD, ADD, FunctionCall("add", "{}", id="AbCdEfGh1")))
    message = message_of(turn, number=12)
    ids = [call["id"] for call in message["tool_calls"]]
    assert ids == ["c00012000", "c00012001", "AbCdEfGh1"]
    assert message["content"] is None and message["reasoning_content"] == "Let me add."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
