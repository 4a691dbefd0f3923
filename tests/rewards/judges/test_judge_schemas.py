"""Schemas and patterns of the user that cannot work are refused at the start, and no reply breaks those that can."""

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import BadReply
from async_grpo.rewards.judges.judge_replies import by_schema
from async_grpo.rewards.judges.judge_schemas import check_reading

SCORE = {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]}


def with_property(schema: object, **definitions: object) -> dict:
    return {**SCORE, "properties": {"score": {"type": "number"}, "a": schema}, "$defs": definitions}


@pytest.mark.parametrize(
    "schema",
    [
        with_property({"$ref": "#/$defs/missing"}),
        with_property({"items": {"anyOf": [{"$ref": "#missing"}]}}),
        with_property({"$dynamicRef": "#missing"}),
        with_property({"$ref": "http://127.0.0.1:9/schema.json"}),
        with_property({"$ref": "https://json-schema.org/draft/2020-12/schema"}),
        with_property({"$ref": "#/$defs/b"}, b={"$ref": "#/$defs/missing"}),
    ],
)
def test_a_reference_that_leads_nowhere_or_out_of_the_schema_is_refused_at_the_start(schema):
    with pytest.raises(ConfigurationError, match="refers to '.+', which is not in it"):
        check_reading(None, schema, "score")


def test_a_schema_that_refers_to_itself_without_an_end_is_refused_at_the_start():
    with pytest.raises(ConfigurationError, match="refers to itself"):
        check_reading(None, {**SCORE, "$ref": "#"}, "score")


def test_references_within_a_schema_work():
    tree = with_property({"type": "array", "items": {"$ref": "#"}})
    named = with_property({"$ref": "#name"}, b={"$anchor": "name", "type": "number"})
    plain = with_property({"const": {"$ref": "no reference"}})
    for schema in (tree, named, plain):
        check_reading(None, schema, "score")
    assert by_schema('{"score": 1, "a": [{"score": 2}]}', tree, "score").score == 1.0
    with pytest.raises(BadReply, match="breaks the schema"):
        by_schema('{"score": 1, "a": "x"}', named, "score")


@pytest.mark.parametrize("number", ["9" * 4000, "Infinity", "-Infinity"])
def test_a_number_beyond_all_floats_is_a_bad_reply_whatever_it_should_be_a_multiple_of(number):
    with pytest.raises(BadReply, match="too large to be a multiple"):
        by_schema(f'{{"score": 1, "a": {number}}}', with_property({"multipleOf": 0.5}), "score")


def test_a_pattern_that_only_re_can_read_is_refused_at_the_start():
    with pytest.raises(ConfigurationError, match="fuzzy"):
        check_reading(r"{e}(\d)", None, "score")
