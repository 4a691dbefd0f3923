"""Which JSON schemas are enforced: random answers under a grammar fit the schema, by another library's judgment."""

import datetime
import decimal
import enum
import json
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
import xgrammar
from chat_templates import MODEL
from pydantic import BaseModel, Field
from transformers import AutoTokenizer

from async_grpo.errors import RequestRefused
from async_grpo.inference.enforceable_schemas import refuse_ignored_keywords, refuse_without_answers
from async_grpo.inference.output_grammars import GrammarHost, GrammarRequest

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ENFORCED: list[dict[str, Any]] = [
    {},
    {"type": ["string", "null"], "maxLength": 3},
    TREE,
    {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]},
    {"enum": ["žluť", "日本", "😀", 'a"b\n', 1, None, True, {"k": [1]}]},
    {"const": {"a": [1, 2]}},
    {"type": "string", "enum": ["a", "b"]},
    {"type": "string", "pattern": "^[a-z]{2,3}$"},
    {"type": "string", "pattern": "[0-9]"},
    {"type": "string", "pattern": '^[^"]+$'},
    {"type": "string", "minLength": 2},
    {"type": "string", "minLength": 20, "maxLength": 100},
    {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 1, "maxLength": 7}},
        "required": ["a"],
    },
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "propertyNames": {"pattern": "^[a-z]$"}},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/x-parts/b"}},
        "required": ["a"],
        "x-parts": {"b": {"type": "null"}},
    },
    {"type": "object", "properties": {"": {"type": "null"}, 'é"\0': {"type": "null"}}, "required": ['é"\0']},
    {"type": "object", "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "object"}]},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 17},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
]
IGNORED = [
    ({"not": {"type": "string"}}, "not cannot be enforced"),
    ({"type": "object", "if": {}, "then": {"required": ["b"]}}, "if cannot be enforced"),
    ({"type": "array", "items": {"multipleOf": 7}}, "at /items: multipleOf cannot be enforced"),
    ({"pattern": "^a$"}, "pattern cannot be enforced without the type string"),
    (
        {"properties": {"a": {"minimum": 5}}},
        "at /properties/a: minimum cannot be enforced without the type integer or number",
    ),
    (
        {"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "minimum": 5},
        "minimum beside $ref cannot be enforced",
    ),
    ({"type": "integer", "anyOf": [{"minimum": 5}]}, "type beside anyOf cannot be enforced"),
    ({"type": "object", "allOf": [{"required": ["b"]}]}, "type beside allOf cannot be enforced"),
    ({"type": "integer", "enum": ["a", 1]}, "type beside enum cannot be enforced"),
    (
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        "the required 'b' is not one of its properties",
    ),
    ({"type": "string", "pattern": '^"a"$'}, "a quote, a backslash or a control character"),
    ({"type": "string", "pattern": r"^a\nb$"}, "a quote, a backslash or a control character"),
]
WITHOUT_ANSWERS = [
    ({"$ref": "#"}, "no finite answer fits it"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "at /$defs/"),
    ({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}, "no finite answer"),
    ({"type": "object", "properties": {"x": {"$ref": "#/y"}}, "y": {"$ref": "#/y"}}, "no finite answer"),
    ({"type": "array", "items": {"anyOf": []}, "minItems": 1}, "at /items: no finite answer"),
    ({"type": "array", "prefixItems": [{"type": []}]}, "at /prefixItems/0: no finite answer"),
    ({"$defs": {"a": {"$anchor": "b"}}, "$ref": "#b"}, "to another document or to an anchor, '#b'"),
]


class Color(enum.Enum):
    RED = "red"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)] = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    names: Annotated[list[str], Field(min_length=1)]


class Order(BaseModel):
    """What frameworks make of a class with many kinds of fields."""

    code: Annotated[str, Field(min_length=1, max_length=8)]
    color: Color = Color.RED
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    note: str | None = Field(None, description="Free text.")
    sizes: dict[str, float]
    pair: tuple[int, str]
    at: datetime.datetime
    key: uuid.UUID
    price: decimal.Decimal
    parts: "list[Order]" = []


@pytest.fixture(scope="module")
def host():
    return GrammarHost(str(MODEL))


def answers(host: GrammarHost, schema: dict[str, Any], count: int, longest: int = 600) -> list[str]:
    """Return random texts that keep to the grammar of a schema, without those that have not ended."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    request = GrammarRequest(json.dumps(schema), [], None, False, "", "")
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(host._grammar(request))
    # Tokens that end something are drawn more often, so that answers are short
    weights = np.ones(info.vocab_size)
    weights[[tokenizer.convert_tokens_to_ids(text) for text in '"}],']] = 50
    weights[info.stop_token_ids] = 50
    random = np.random.default_rng(0)
    bits = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    texts = []
    for _ in range(count):
        matcher = xgrammar.GrammarMatcher(compiled)
        token_ids: list[int] = []
        while len(token_ids) < longest and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(bits, 0)
            is_allowed = np.unpackbits(bits.numpy()[0].view(np.uint8), bitorder="little")[: info.vocab_size]
            assert is_allowed.any(), f"no token may follow {tokenizer.decode(token_ids)!r}"
            chances = weights * is_allowed
            token_ids.append(int(random.choice(info.vocab_size, p=chances / chances.sum())))
            assert matcher.accept_token(token_ids[-1])
        if matcher.is_terminated():
            texts.append(tokenizer.decode(token_ids[:-1]))
    return texts


@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_each_answer_under_an_enforced_schema_is_json_that_fits_it(host, schema):
    texts = answers(host, schema, count=12)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_a_schema_of_pydantic_with_many_kinds_of_fields_is_enforced(host):
    texts = answers(host, Order.model_json_schema(), count=4, longest=4000)
    assert texts
    for text in texts:
        jsonschema.validate(json.loads(text), Order.model_json_schema())


@pytest.mark.parametrize(("schema", "reason"), IGNORED)
def test_a_schema_of_which_a_part_would_be_ignored_is_refused_with_the_place(schema, reason):
    with pytest.raises(RequestRefused) as refusal:
        refuse_ignored_keywords(schema)
    assert reason in str(refusal.value)
    refuse_without_answers(schema)


@pytest.mark.parametrize(("schema", "reason"), WITHOUT_ANSWERS)
def test_a_schema_that_no_finite_answer_fits_is_refused(schema, reason):
    with pytest.raises(RequestRefused) as refusal:
        refuse_without_answers(schema)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minimum": 5},
        {"uniqueItems": False, "minLength": 0, "required": []},
        {"title": "A", "description": "b", "default": 3, "x-unknown": {"not": {}}},
        {"enum": [{"$ref": "x"}]},
        {"type": "object", "properties": {"not": {"type": "string"}, "$ref": {"type": "null"}}},
    ],
)
def test_what_restricts_no_answer_is_accepted(schema):
    refuse_ignored_keywords(schema)
    refuse_without_answers(schema)


def test_a_tool_s_arguments_are_enforced_as_far_as_possible(host):
    parameters = {"type": "object", "properties": {"a": {"multipleOf": 2}}, "required": ["a"]}
    function = {"name": "double", "parameters": parameters}
    tool = {"type": "function", "function": function}
    assert '"multipleOf": 2' in host._grammar(GrammarRequest("", [tool], "hermes", True, "", ""))

    function["parameters"] = {"$ref": "#"}
    with pytest.raises(RequestRefused, match="tool 'double': the schema: no finite answer"):
        host._grammar(GrammarRequest("", [tool], "hermes", True, "", ""))
