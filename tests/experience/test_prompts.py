"""Kinds of prompts in rows: each is right, or refused by name, and its neighbours stay as they are."""

import json
import re
from functools import partial

import numpy as np
import pytest

from async_grpo.environments.chat import Chat
from async_grpo.environments.trajectory_client import trusted_messages
from async_grpo.errors import ConfigurationError
from async_grpo.experience.dataset import questions_of
from async_grpo.experience.prompt_options import PromptOptions
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.types import Prompt
from tests.helpers import prompt_models
from tests.helpers.prompt_models import ASKED, BOS_TEXT, EOS_TEXT, chat, prompt_text, user


@pytest.fixture(scope="module")
def make_tokenizer(tmp_path_factory):
    """Return a function that loads a fresh tokenizer of `MODELS`."""
    return partial(prompt_models.make_tokenizer, tmp_path_factory.mktemp("models"))


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
NULLS = {"name": None, "tool_calls": None, "tool_call_id": None}

# A row's messages -> the messages of its prompt
RIGHT = [
    # content parts
    ([user([{"type": "text", "text": "3+4?"}])], [("user", "3+4?")]),
    ([user([{"type": "text", "text": "3+"}, {"type": "text", "text": "4?"}])], [("user", "3+4?")]),
    ([user([{"type": "text", "text": "3+4?", "image_url": None}])], [("user", "3+4?")]),
    ([user([{"type": "text", "text": ""}, {"type": "text", "text": "x"}])], [("user", "x")]),
    (
        [{"role": "system", "content": [{"type": "text", "text": "Add."}]}, user("3+4?")],
        [("system", "Add."), ("user", "3+4?")],
    ),
    # neighbours of parts: texts that look like them stay as they are
    ([user("[{'type': 'text', 'text': '3+4?'}]")], [("user", "[{'type': 'text', 'text': '3+4?'}]")]),
    ([user('{"type": "text"}')], [("user", '{"type": "text"}')]),
    ([user("[1, 2]")], [("user", "[1, 2]")]),
    ([user("None")], [("user", "None")]),
    ([{"role": "system", "content": "a"}, user("")], [("system", "a"), ("user", "")]),
    ([user("a <|im_end|> b")], [("user", "a <|im_end|> b")]),
    ([user("x\u2028y\x85z\u00e9😀")], [("user", "x\u2028y\x85z\u00e9😀")]),
    # numbers
    ([user(34)], [("user", "34")]),
    ([user(0)], [("user", "0")]),
    ([user(-2.5)], [("user", "-2.5")]),
    # fields that are null, as `datasets` fills them in
    ([user("3+4?") | NULLS], [("user", "3+4?")]),
    ([user("3+4?") | {"name": "Ann"}], [("user", "3+4?")]),
    # roles, several turns, answers in the middle
    ([{"role": "developer", "content": "Add."}, user("3+4?")], [("developer", "Add."), ("user", "3+4?")]),
    (
        [user("3+4?"), {"role": "assistant", "content": "7"}, user("And 5?")],
        [("user", "3+4?"), ("assistant", "7"), ("user", "And 5?")],
    ),
    (
        [user("3+4?"), {"role": "assistant", "content": "7"} | NULLS, user("And 5?")],
        [("user", "3+4?"), ("assistant", "7"), ("user", "And 5?")],
    ),
    ([user("a"), user("b")], [("user", "a"), ("user", "b")]),
    ([user("a"), {"role": "system", "content": "b"}], [("user", "a"), ("system", "b")]),
    (
        [user("a"), {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "add"}],
        [("user", "a"), ("tool", "7")],
    ),
    (
        [
            user("a"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": 7},
        ],
        [("user", "a"), ("assistant", ""), ("tool", "7")],
    ),
    (
        [user("a"), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}],
        [("user", "a"), ("assistant", ""), ("tool", "7")],
    ),
]


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize(("messages", "expected"), RIGHT)
def test_messages_as_people_write_them_become_the_prompt(messages, expected, column, make_tokenizer):
    tokenizer = make_tokenizer("tiny")
    assert prompt_text(tokenizer, {column: messages}) == chat(*expected)
    # The endpoint and the environments render them alike
    assert Chat(tokenizer).render(messages) == chat(*expected)


REFUSED = [
    # content
    ([user(None)], "message 1 of 1: its content is null"),
    ([user("a"), {"role": "assistant", "content": None}, user("b")], "message 2 of 3: its content is null"),
    ([user("a"), {"role": "assistant", "content": None, "tool_calls": []}, user("b")], "content is null"),
    ([{"role": "user"}], "message 1 of 1: it has no content"),
    ([user({"type": "text", "text": "a"})], "must be a text or a list of text parts"),
    ([user(float("nan"))], "must be a text or a list of text parts, not nan"),
    ([user(float("inf"))], "must be a text or a list of text parts, not inf"),
    ([user(True)], "must be a text or a list of text parts, not True"),
    ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "part of the type 'image_url'"),
    ([user([{"type": "text", "text": "a"}, {"type": "image"}])], "part of the type 'image'"),
    ([user([{"type": "input_text", "text": "a"}])], "part of the type 'input_text'"),
    ([user([{"text": "a"}])], "a part is "),
    ([user(["a"])], "a part is "),
    ([user([{"type": "text", "text": None}])], "text part without text"),
    ([user([{"type": "text"}])], "text part without text"),
    # roles and names
    ([{"content": "3+4?"}], "message 1 of 1: it has no role"),
    ([{"role": None, "content": "3+4?"}], "it has no role"),
    ([{"role": "", "content": "3+4?"}], "the role '' is unknown"),
    ([{"role": "USER", "content": "3+4?"}], "the role 'USER' is unknown.*did you mean user"),
    ([{"role": "user ", "content": "3+4?"}], "the role 'user ' is unknown.*did you mean user"),
    ([{"role": "human", "content": "3+4?"}], "the role 'human' is unknown.*did you mean user"),
    ([{"role": "model", "content": "3+4?"}], "the role 'model' is unknown.*did you mean assistant"),
    ([{"role": "gpt", "content": "3+4?"}], "the role 'gpt' is unknown.*did you mean assistant"),
    ([{"role": "critic", "content": "3+4?"}], "the role 'critic' is unknown; known: [a-z, ]*$"),
    ([{"role": 1, "content": "3+4?"}], "the role 1 is unknown"),
    ([{"role": ["user"], "content": "3+4?"}], r"the role \['user'\] is unknown"),
    (
        [{"from": "human", "value": "3+4?"}],
        "it has no role.*from is called role, value is called content here",
    ),
    ([{"role": "user", "value": "3+4?"}], "it has no content.*value is called content here"),
    ([user("a") | {"name": 7}], "its name must be a text, not 7"),
    # what is no message
    (["3+4?"], "messages must be a list of objects"),
    ([None], "messages must be a list of objects"),
    ([[user("a")]], "messages must be a list of objects"),
    ([], "and it is empty"),
    # the answer
    ([user("3+4?"), {"role": "assistant", "content": "7"}], "the last message is the assistant's"),
    ([{"role": "assistant", "content": "Hello."}], "the last message is the assistant's"),
    ([user("a"), {"role": "assistant", "tool_calls": [CALL]}], "the last message is the assistant's"),
    # tool calls
    ([user("a"), {"role": "assistant", "content": "", "tool_calls": "add(3)"}, user("b")], "must be a list"),
    ([user("a"), {"role": "assistant", "content": "", "tool_calls": ["add"]}, user("b")], "a call is"),
    ([user("a"), {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}, user("b")], "a call is"),
    ([user("a\ud83d")], "half of a surrogate pair"),
    ([user([{"type": "text", "text": "a\ud83d"}])], "half of a surrogate pair"),
]


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize(("messages", "words"), REFUSED)
def test_messages_that_are_none_are_refused_by_row(messages, words, column, make_tokenizer):
    with pytest.raises(ConfigurationError, match=f"(?s)^rows.jsonl, line 1: .*{words}"):
        prompt_text(make_tokenizer("tiny"), {column: messages})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": None, "prompt": [user("3+4?")]}, ASKED),
        ({"messages": None, "prompt": "3+4?"}, "3+4?"),
        ({"input_token_ids": None, "messages": [user("3+4?")]}, ASKED),
        ({"input": None, "prompt": "3+4?", "messages": None, "tools": None}, "3+4?"),
        ({"prompt": None, "input": "3+4?"}, "3+4?"),
        ({"tools": [], "messages": [user("3+4?")]}, ASKED),
        ({"prompt": "a", "input": ""}, "a"),
        # neighbours: the order of the columns
        ({"messages": [user("3+4?")], "prompt": "a", "input": "b"}, ASKED),
        ({"prompt": [user("3+4?")], "input": "b"}, ASKED),
        ({"prompt": "a", "input": "b"}, "b"),
        ({"input_token_ids": [64], "messages": [user("b")]}, "a"),
        ({"input": "b", "prompt": 7}, "b"),
    ],
)
def test_a_column_that_is_null_counts_as_missing(row, expected, make_tokenizer):
    assert prompt_text(make_tokenizer("tiny"), row) == expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": None}, "a row needs input_token_ids, messages, or prompt/input text"),
        ({"messages": "3+4?"}, "messages is a str"),
        ({"messages": {"role": "user"}}, "messages is a dict"),
        ({"prompt": 7}, "the prompt is a int"),
        ({"input": [user("a")]}, "the prompt is a list"),
        ({"messages": [user("a")], "tools": ["add"]}, "the column tools must be a list of JSON schemas"),
        ({"messages": [user("a")], "tools": {"add": {}}}, "the column tools must be a list of JSON schemas"),
        (
            {"messages": [user("a")], "tools": "add, subtract"},
            "the column tools must be a list of JSON schemas",
        ),
        (
            {"messages": [user("a")], "tools": [TOOL | {"x": "\ud800"}]},
            "tools holds half of a surrogate pair",
        ),
        ({"prompt": "\udc00"}, "prompt holds half of a surrogate pair"),
        ({"input": "x" * 300_000}, "a prompt of 300000 characters"),
        ({"messages": [user([{"type": "text", "text": "x" * 300_000}])]}, "a prompt of 300000 characters"),
    ],
)
def test_a_row_without_a_prompt_is_refused(row, words, make_tokenizer):
    with pytest.raises(ConfigurationError, match=f"^rows.jsonl, line 1: {words}"):
        prompt_text(make_tokenizer("tiny"), row)


@pytest.mark.parametrize(
    ("model", "row", "expected"),
    [
        # nothing behind a text, and one first token in front of it
        ("addeos", {"input": "3+4?"}, "3+4?"),
        ("addeos", {"input": f"3+4?{EOS_TEXT}"}, f"3+4?{EOS_TEXT}"),
        ("addeos", {"messages": [user("3+4?")]}, ASKED),
        ("both", {"input": "3+4?"}, f"{BOS_TEXT}3+4?"),
        ("both", {"input": f"{BOS_TEXT}3+4?"}, f"{BOS_TEXT}3+4?"),
        ("both", {"messages": [user("3+4?")]}, BOS_TEXT + ASKED),
        ("bos", {"input": "3+4?"}, f"{BOS_TEXT}3+4?"),
        ("bos", {"prompt": f"{BOS_TEXT}3+4?"}, f"{BOS_TEXT}3+4?"),
        ("bosunnamed", {"input": f"{BOS_TEXT}3+4?"}, f"{BOS_TEXT}3+4?"),
        ("bosunnamed", {"input": "3+4?"}, f"{BOS_TEXT}3+4?"),
        # neighbours: a first token elsewhere, twice in the row itself, and given token ids
        ("bos", {"input": f" {BOS_TEXT}3+4?"}, f"{BOS_TEXT} {BOS_TEXT}3+4?"),
        ("bos", {"input": f"3{BOS_TEXT}"}, f"{BOS_TEXT}3{BOS_TEXT}"),
        ("bos", {"input": f"{BOS_TEXT}{BOS_TEXT}3"}, f"{BOS_TEXT}{BOS_TEXT}3"),
        ("both", {"input_token_ids": [51, 52]}, "TU"),
        ("tiny", {"input": "3+4?"}, "3+4?"),
        ("tiny", {"input": f"{BOS_TEXT}3+4?"}, f"{BOS_TEXT}3+4?"),
    ],
)
def test_a_prompt_begins_with_one_first_token_and_ends_with_no_end_token(
    model, row, expected, make_tokenizer
):
    tokenizer = make_tokenizer(model)
    assert prompt_text(tokenizer, row) == expected
    if "input_token_ids" not in row and "input" in row:  # a text of an agent (/v1/completions)
        assert tokenizer.decode(Chat(tokenizer).encode(row["input"], begins=True)) == expected
        cut = Chat(tokenizer).encode(row["input"], begins=True, breaks=(1,))
        assert tokenizer.decode(cut[-1:]) == expected[-1] or expected.endswith((BOS_TEXT, EOS_TEXT))


NESTED_NULLS = {
    "type": "function",
    "strict": None,
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"default": None, "enum": None}, "b": None}},
    },
}


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([TOOL], [TOOL]),
        (json.dumps([TOOL]), [TOOL]),
        (
            [NESTED_NULLS],
            [
                {
                    "type": "function",
                    "function": {"name": "add", "parameters": {"properties": {"a": {"default": None}}}},
                }
            ],
        ),
        (None, None),
        ([], None),
        ("", None),
        ("[]", None),
    ],
)
@pytest.mark.parametrize("model", ["usestools", "dicttemplate"])
def test_the_column_tools_reaches_the_template(tools, expected, model, make_tokenizer, caplog):
    written = json.dumps(expected) if expected else ""
    row = {"messages": [user("3+4?")], "tools": tools}
    assert prompt_text(make_tokenizer(model), row) == written + ASKED
    assert not caplog.records


@pytest.mark.parametrize(
    ("model", "row", "warning"),
    [
        ("tiny", {"messages": [user("a")], "tools": [TOOL]}, "does not use the column tools"),
        (
            "tiny",
            {"prompt": "a", "tools": [TOOL]},
            "the column tools is not used, because the prompt is a text",
        ),
        ("nogenprompt", {"messages": [user("a")]}, r"answers begin with '<\|im_start\|>assistant\\n'"),
        ("forgets", {"messages": [{"role": "system", "content": "b"}, user("a")]}, "of the role 'system'"),
        ("forgets", {"messages": [user("a"), {"role": "tool", "content": "7"}]}, "of the role 'tool'"),
        (
            "tiny",
            {
                "messages": [
                    user("a"),
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "content": "7"},
                ]
            },
            "leaves out tool calls",
        ),
        # neighbours
        ("tiny", {"messages": [user("a")]}, None),
        ("tiny", {"messages": [user("a"), user("")]}, None),
        ("forgets", {"messages": [user("a")]}, None),
        ("nogenprompt", {"input": "a"}, None),
        ("tiny", {"messages": [user("a")], "tools": None}, None),
        ("usestools", {"messages": [user("a")], "tools": [TOOL]}, None),
        ("tiny", {"messages": [user("a"), {"role": "tool", "content": "7"}]}, None),
    ],
)
def test_what_a_template_leaves_out_is_said_once(model, row, warning, make_tokenizer, caplog):
    rows = [("rows.jsonl, line 1", dict(row)), ("rows.jsonl, line 2", dict(row))]
    questions_of(rows, make_tokenizer(model), 900, 266)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (warning is not None)
    if warning is not None:
        assert messages[0].startswith("rows.jsonl, line 1: ")
        assert caplog.records[0].levelname == "WARNING"
        assert re.search(warning, messages[0])


@pytest.mark.parametrize(
    ("model", "row", "words"),
    [
        (
            "nosystem",
            {"messages": [{"role": "system", "content": "b"}, user("a")]},
            "System role not supported",
        ),
        ("broken", {"messages": [user("a")]}, "endfor"),
        ("dictnodefault", {"messages": [user("a")]}, "no default"),
        ("notemplate", {"messages": [user("a")]}, "give one with --chat-template"),
    ],
)
def test_a_template_refuses_in_its_own_words_where_the_endpoint_hears_them_too(
    model, row, words, make_tokenizer
):
    tokenizer = make_tokenizer(model)
    with pytest.raises(ConfigurationError, match=f"rows.jsonl, line 1: .*{words}"):
        prompt_text(tokenizer, row)
    endpoint_words = "--chat-template" if model == "notemplate" else words
    with pytest.raises(ConfigurationError, match=endpoint_words):
        Chat(tokenizer).render(row["messages"])


def test_a_template_that_refuses_the_added_system_message_is_told_with_the_option(make_tokenizer):
    renderer = PromptRenderer(make_tokenizer("nosystem"), PromptOptions(system_prompt="Be brief."))
    message = r"refuses these messages: System role .* \(the first message is that of --system-prompt\)"
    with pytest.raises(ConfigurationError, match=message):
        renderer.prompt_tokens({"messages": [user("3+4?")]}, 1000)


def test_a_template_without_end_is_interrupted_by_row(make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer("tiny")
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("async_grpo.experience.prompts.TEMPLATE_S", 0.2)
    with pytest.raises(ConfigurationError, match="line 1: .* cannot be applied: .*takes more than 0.2 s"):
        prompt_text(tokenizer, {"messages": [user("a")]})


def test_the_endpoint_continues_a_last_message_of_the_assistant(make_tokenizer):
    renderer = PromptRenderer(make_tokenizer("tiny"))
    messages = [user("3+4?"), {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    assert renderer.render(messages) == ASKED + "It is"


def test_tool_calls_without_answers_are_not_continued(make_tokenizer):
    renderer = PromptRenderer(make_tokenizer("tiny"))
    for content in (None, "", "I add."):
        call = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        with pytest.raises(ConfigurationError, match="add a message of the role tool"):
            renderer.render([user("3+4?"), call])
        assert renderer.render([user("3+4?"), call, {"role": "tool", "content": "7"}]) == chat(
            ("user", "3+4?"), ("assistant", content or ""), ("tool", "7")
        )


def test_messages_of_rows_are_trusted_in_the_form_in_which_they_are_rendered():
    row = {"messages": [user([{"type": "text", "text": "a <|im_end|>"}]) | NULLS], "input_token_ids": None}
    prompt = Prompt(0, np.empty(0, np.int32), row)
    assert trusted_messages(prompt) == [user("a <|im_end|>")]
