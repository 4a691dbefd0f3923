"""The rewards by pattern, literal answer, length, vote and schema: by hand, and against plain loops."""

import json
import math
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.rewards.adapter.result import read_change
from async_grpo.rewards.builtin import json_schema, mathd
from async_grpo.rewards.builtin.text import cosine, exact, length, overlong, regex
from reward_registry import REWARD_ADAPTERS, RewardType
from tests.helpers.answers import answer_of


def reward(adapter, completion: str, *options, **row) -> float:
    return adapter({"completion": completion, **row}, *options)["reward"]


# regex


@pytest.mark.parametrize(
    ("text", "pattern", "search", "expected"),
    [
        ("12 apples", r"\d+ \w+", False, 1.0),
        ("about 12 apples", r"\d+ \w+", True, 1.0),
        ("so</think>\n yes \n", "yes|no", False, 1.0),
        ("yes</think> maybe", "yes", True, 0.0),  # the thought does not count
        ("a\nb", "(?s)a.b", False, 1.0),
        ("ab", "a", False, 0.0),
        ("", "x*", False, 1.0),
    ],
)
def test_the_pattern_decides(text, pattern, search, expected):
    assert reward(regex, text, pattern, search) == expected


@pytest.mark.parametrize("pattern", [None, "", 7, "(", "a{2,1}"])
def test_no_pattern_or_a_broken_one_raises_so_that_the_sample_fails(pattern):
    with pytest.raises(ValueError, match="pattern|regular expression"):
        reward(regex, "a", pattern)


def test_endless_backtracking_is_a_time_out_and_not_a_hang(monkeypatch):
    monkeypatch.setattr("async_grpo.rewards.builtin.text.SECONDS", 0.1)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="takes more than"):
        reward(regex, "a" * 40 + "!", "(a+)+")
    assert time.monotonic() - started < 10
    assert reward(regex, "aaa", "(a+)+") == 1.0  # and nothing is left of it


def test_the_pattern_of_the_row_the_end_token_and_a_text_beyond_the_limit():
    assert reward(regex, "b", "a", pattern="b") == reward(regex, "a", "a", pattern=None) == 1.0
    assert reward(regex, "yes<eos>", "yes", end_token="<eos>") == 1.0
    assert reward(regex, "a" * 100_001, "a*") == 0.0


# exact


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        (r"it is \boxed{B}", {"answer": "B"}, 1.0),
        ("so</think>\n<answer> Paris </answer>", {"answer": "paris"}, 1.0),
        ("so</think> The  Hague\n", {"answers": ["Den Haag", "the hague"]}, 1.0),
        ("Den Haag", {"answers": ["The Hague"]}, 0.0),
        ("B</think> A", {"answer": "B"}, 0.0),
        ("1,234", {"answer": 1234}, 1.0),
        ("\uff22", {"answer": "B"}, 1.0),  # a full-width letter
        ("STRASSE", {"answer": "Straße"}, 1.0),
        ("", {"answer": "B"}, 0.0),
        (r"\boxed{}", {"answer": "B"}, 0.0),
        ("AB", {"answer": "A"}, 0.0),
    ],
)
def test_the_answer_is_literally_one_of_those_accepted(text, row, expected):
    assert reward(exact, text, **row) == expected


def test_white_space_and_capitals_count_if_asked():
    assert reward(exact, "The  Hague", False, answer="the hague") == 0.0
    assert reward(exact, "the hague", False, answer="The Hague") == 1.0
    assert reward(exact, "the hague", True, True, answer="The Hague") == 0.0
    assert reward(exact, "The  Hague", True, True, answer="The Hague") == 1.0
    for is_stripped in (True, False):  # in the row as in the completion
        assert reward(exact, "the hague", is_stripped, answer="the  hague") == float(is_stripped)
        assert reward(exact, "the  hague", is_stripped, answer="the  hague") == 1.0


@pytest.mark.parametrize(
    "row", [{}, {"answer": ""}, {"answers": []}, {"answers": "A"}, {"answers": ["A", ""]}]
)
def test_a_row_without_an_answer_raises(row):
    with pytest.raises(ValueError, match="answer"):
        reward(exact, "", **row)


# length


@pytest.mark.parametrize(("max_tokens", "cache_tokens"), [(100, 20), (7, 7), (3, 1)])
def test_overlong_is_equation_13_of_dapo(max_tokens, cache_tokens):
    for num_tokens in range(2 * max_tokens):
        slope = ((max_tokens - cache_tokens) - num_tokens) / cache_tokens
        expected = slope if num_tokens > max_tokens - cache_tokens else 0.0
        expected = -1.0 if num_tokens > max_tokens else expected
        assert overlong(num_tokens, max_tokens, cache_tokens) == expected


def test_cosine_goes_from_r_0_to_r_L_and_is_r_e_at_the_end():
    for right, at_zero, at_max in ((True, 2.0, 1.0), (False, -10.0, 0.0)):
        curve = [cosine(num_tokens, 1000, right) for num_tokens in range(1000)]
        assert curve[0] == at_zero and curve[999] == pytest.approx(at_max, abs=1e-4)
        assert curve[500] == pytest.approx((at_zero + at_max) / 2) and curve[250] == pytest.approx(
            at_max + (at_zero - at_max) * (1 + math.sqrt(0.5)) / 2
        )
        assert curve == sorted(curve, reverse=right)
        assert cosine(1000, 1000, right) == cosine(5000, 1000, right) == -10.0


def test_the_length_is_counted_in_tokens_and_the_judge_says_what_is_right():
    row = {"completion_token_ids": [1] * 50, "completion": r"\boxed{27}", "answer": "27"}
    assert length(row, "cosine", 100, 20) == {"reward": 1.5, "num_tokens": 50.0, "right": 1.0}
    wrong = length(row | {"answer": "26"}, "cosine", 100, 20, "mathd")
    assert (wrong["reward"], wrong["right"]) == (-5.0, 0.0)
    task = {"completion": "so</think> <answer>3*(4+5)</answer>", "nums": [3, 4, 5], "target": 27}
    assert length(row | task, "cosine", 100, 20, "countdown")["right"] == 1.0  # though not well formed
    assert length(row, "overlong", 60, 20)["reward"] == -0.5


def test_impossible_options_and_rows_that_the_judge_cannot_judge_raise():
    row = {"completion_token_ids": [1], "completion": "x"}
    for options in (("linear",), ("overlong", 10, 20), ("overlong", 10, 0), ("cosine", 10, 5, "os")):
        with pytest.raises(ValueError, match="needs a schedule"):
            length(row, *options)
    with pytest.raises(ValueError, match="answer"):
        length(row, "cosine", 10, 5)


# majority


def member(text: str | None, status: str = "ok", answer: str | None = None) -> dict:
    completion = "I do not know." if text is None else f"so $\\boxed{{{text}}}$"
    return {"sample": {"completion": completion, "answer": answer}, "status": status}


def rewards(group: list[dict]) -> list[float | None]:
    return [change and change["reward"] for change in mathd.post_process_scores(group)]


def test_notation_does_not_split_the_vote_and_what_failed_has_none_and_stays_failed():
    group = [member(text) for text in (r"\dfrac12", "0.5", "1/2", "7", "7", None)]
    assert rewards(group) == [1.0] * 3 + [0.0] * 3
    assert rewards([member("7", "failed"), member("7", "timed_out"), member("8")]) == [None, None, 1.0]


@given(
    st.lists(st.sampled_from(["7", "8", "12", "x", None]), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_the_vote_is_a_plain_count_and_does_not_depend_on_the_order(texts, rng):
    best, most = None, 0
    for text in ["7", "8", "x", "12"]:  # ties: the shortest, then by the alphabet
        count = 0
        for other in texts:
            count += other == text
        if count > most:
            best, most = text, count
    expected = [float(text is not None and text == best) for text in texts]
    assert rewards([member(text) for text in texts]) == expected
    order = list(range(len(texts)))
    rng.shuffle(order)
    assert rewards([member(texts[i]) for i in order]) == [expected[i] for i in order]


def test_the_true_reward_and_the_share_of_the_majority_are_logged_beside_it():
    adapter, group = REWARD_ADAPTERS[RewardType.MAJORITY], []
    for text in ("7", "8", "8"):
        sample = member(text, answer="7")["sample"]
        group.append(answer_of(adapter, sample, {}) | {"sample": sample})
    changes = adapter.post_process_scores(group)
    final = [
        read_change(change, {k: v for k, v in before.items() if k != "sample"})
        for change, before in zip(changes, group, strict=True)
    ]
    assert [answer["reward"] for answer in final] == [0.0, 1.0, 1.0]
    assert [answer["extra"]["true_reward"] for answer in final] == [1.0, 0.0, 0.0]
    assert {(answer["extra"]["share"], answer["extra"]["voted"]) for answer in final} == {(2 / 3, 1.0)}
    assert "true_reward" not in mathd.score_vote({"completion": "x"})


# json_schema

PROPERTIES = {"name": {"type": "string"}, "n": {"type": "integer"}}
SCHEMA = {"type": "object", "required": ["name"], "properties": PROPERTIES}


@pytest.mark.parametrize(
    ("text", "expected", "parsed"),
    [
        ('so</think>\n {"name": "a", "n": 1} \n', 1.0, 1.0),
        ('Here:\n```json\n{"name": "a"}\n```\nDone.', 1.0, 1.0),
        ('```\n{"name": 1}\n```\n```json\n{"name": "a"}\n```', 1.0, 1.0),
        ('{"n": 1}', 0.0, 1.0),
        ('{"name": "a", "n": 1.5}', 0.0, 1.0),
        ('{"name": "a"} and more', 0.0, 0.0),
        ('{"name": "a", "x": NaN}', 0.0, 0.0),
        ('{"name": "a", "x": 1e999}', 0.0, 0.0),
        ('{"name": "a", "name": "b"}', 0.0, 0.0),
        ('{"name": "a", "x": ' + "9" * 5000 + "}", 0.0, 0.0),
        ("", 0.0, 0.0),
        ('{"name": "' + "[" * 500 + '"}', 1.0, 1.0),  # brackets in a string are no depth
        ('{"name": "a", "x": ' + "[" * 99 + "]" * 99 + "}", 1.0, 1.0),
        ("[" * 100_000, 0.0, 0.0),
        ('{"name": "' + "a" * 200_000 + '"}', 0.0, 0.0),
    ],
)
def test_only_strict_json_that_fits_the_schema_is_worth_anything(text, expected, parsed):
    for schema in (SCHEMA, json.dumps(SCHEMA)):
        result = json_schema.score({"completion": text, "schema": schema})
        assert result == {"reward": expected, "parsed": parsed}


def test_the_schema_of_the_row_goes_before_the_option_and_its_draft_is_respected():
    assert reward(json_schema.score, "1", {"type": "string"}, schema={"type": "integer"}) == 1.0
    assert reward(json_schema.score, "1", '{"type": "string"}') == 0.0
    draft = {"items": [{"type": "integer"}], "additionalItems": False}  # two keywords that are gone since
    old = draft | {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert reward(json_schema.score, "[1, 2]", schema=old) == 0.0
    with pytest.raises(ValueError, match="no JSON schema"):
        reward(json_schema.score, "[1, 2]", schema=draft)


@pytest.mark.parametrize("schema", [None, 7, "{", {"type": "nothing"}, [], {"pattern": "("}])
def test_what_is_no_schema_raises_so_that_the_sample_fails(schema):
    with pytest.raises(ValueError, match="schema"):
        reward(json_schema.score, '{"a": "("}', schema=schema)


def test_a_reference_into_the_network_is_not_followed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.3)
        schema = {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/schema.json"}
        with pytest.raises(ValueError, match="a reference to something outside of it"):
            reward(json_schema.score, "1", schema=schema)
        with pytest.raises(TimeoutError):
            server.accept()
    inside = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}
    assert [reward(json_schema.score, text, schema=inside) for text in ("1", '"1"')] == [1.0, 0.0]


def test_a_value_too_deep_for_a_recursive_schema_is_no_right_one():
    schema = {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}, "$ref": "#/$defs/l"}
    assert json_schema.score({"completion": "[" * 5 + "]" * 5, "schema": schema})["reward"] == 1.0
    for depth in (500, 900, 10_000):
        assert json_schema.score({"completion": "[" * depth + "]" * depth, "schema": schema})["reward"] == 0.0


def test_a_pattern_in_the_schema_that_does_not_end_is_a_time_out(monkeypatch):
    monkeypatch.setattr(json_schema, "SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        reward(json_schema.score, json.dumps("a" * 40 + "!"), schema={"pattern": "^(a+)+$"})


@given(st.text(alphabet='[]{}",:0123456789.eE+-\\ntrufalsN "', max_size=60) | st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_no_text_raises(text):
    assert reward(json_schema.score, text, True) in (0.0, 1.0)


def test_the_page_has_all_of_them_and_passes_their_options_on():
    row = {"completion": "AB", "answer": "ab", "schema": True, "completion_token_ids": [1] * 10}

    def paid(kind: RewardType, **options) -> float:
        return answer_of(REWARD_ADAPTERS[kind], row, options)["reward"]

    assert paid(RewardType.EXACT) == 1.0 and paid(RewardType.EXACT, case=True) == 0.0
    assert paid(RewardType.REGEX, pattern="b") == 0.0
    assert paid(RewardType.REGEX, pattern="B", search=True) == 1.0
    assert paid(RewardType.LENGTH, max_tokens=10, cache_tokens=4) == -1.0
    assert paid(RewardType.LENGTH, schedule="cosine", judge="exact", max_tokens=20) == 1.5
    assert paid(RewardType.JSON_SCHEMA) == 0.0
