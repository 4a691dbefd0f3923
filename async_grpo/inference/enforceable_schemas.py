"""Refuse a JSON schema if xgrammar would ignore a part of it. An enforced answer then always fits its schema.

xgrammar reads only one of the keywords `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type`, and ignores the
keywords beside it. It also ignores `not`, `if` and others, without an error. An agent would get answers that do not fit
its schema.

Two parts are accepted although xgrammar does not enforce them, because clients use them often and they matter for few
answers. `oneOf` is enforced as `anyOf`. A look-ahead in a pattern is dropped (pydantic writes one for `Decimal`).
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

from async_grpo.errors import RequestRefused
from async_grpo.inference.schema_parts import schemas_in, target_of, types_of

# Keywords in the order in which xgrammar looks for them. It reads the first of these that the schema has, and beside it
# only the keywords in BY_TYPE
READ_FIRST = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# For each type, the keywords that xgrammar enforces together with it
BY_TYPE = {
    "string": ("pattern", "format", "minLength", "maxLength"),
    "integer": NUMBER_KEYWORDS,
    "number": NUMBER_KEYWORDS,
    "array": ("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    ),
}
# Keywords that xgrammar never enforces, with the types whose values they restrict; () means all types
NEVER_ENFORCED: dict[str, tuple[str, ...]] = {
    "not": (),
    "if": (),
    "$dynamicRef": (),
    "$recursiveRef": (),
    "multipleOf": ("integer", "number"),
    "contains": ("array",),
    "uniqueItems": ("array",),
    "additionalItems": ("array",),
    "dependentRequired": ("object",),
    "dependentSchemas": ("object",),
    "dependencies": ("object",),
}
# For each keyword, the value with which it restricts nothing
REQUIRES_NOTHING = {
    "uniqueItems": False,
    "minLength": 0,
    "minItems": 0,
    "minProperties": 0,
    "required": [],
    "additionalProperties": True,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
}
# xgrammar cannot compile some patterns that repeat a part more than 128 times. This limit leaves a margin
MAX_REPEATS = 100
# A character of a string that needs no escape
CHARACTER = r'[^"\\\x00-\x1f]'
# The length is limited, because a text with many "[^" and no "]" would otherwise take quadratic time
NEGATED_CLASS = re.compile(r"\[\^(?:\\.|[^\]\\]){0,200}\]")
# Characters that JSON must escape. In a pattern, xgrammar would let the policy write them without the escape
ESCAPED_IN_JSON = re.compile(r'["\x00-\x1f]|\\(?:[\\nrtfv0]|x[01]|u00[01])')
TYPE_OF_VALUE = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


def refuse_ignored_keywords(schema: Mapping[str, Any]) -> None:
    """Refuse a schema if xgrammar would ignore a part of it.

    Raises:
        RequestRefused: The message names the keyword and its place.
    """
    for path, part in schemas_in(schema):
        # Names of properties are always strings, so this schema needs no type
        is_of_names = path.endswith("/propertyNames")
        for keyword in () if is_of_names else _ignored_keywords(part):
            _refuse(path, _why_ignored(keyword, part))
        _refuse_pattern(path, part)
        branches = part.get("allOf")
        if isinstance(branches, list) and len(branches) > 1:
            # xgrammar would enforce none of the schemas. Of the known vLLM versions, only 0.32 refuses this
            _refuse(path, "allOf with several schemas cannot be enforced")
        names = part.get("required")
        if isinstance(names, list) and "required" in _enforced_keywords(part):
            properties = part.get("properties")
            missing = [name for name in names if not isinstance(properties, dict) or name not in properties]
            if missing:
                _refuse(path, f"the required {str(missing[0])[:100]!r} is not one of its properties")


def _ignored_keywords(schema: Mapping[str, Any]) -> list[str]:
    """Return the keywords of a schema that restrict answers but that xgrammar ignores."""
    types = types_of(schema)
    enforced = _enforced_keywords(schema)
    ignored = []
    for keyword, value in schema.items():
        concerned_types = NEVER_ENFORCED.get(keyword, _types_with(keyword))
        has_meaning = keyword in READ_FIRST or keyword in NEVER_ENFORCED or bool(concerned_types)
        if not has_meaning or keyword in enforced:
            continue
        # The keyword restricts only values of other types than the schema's, so ignoring it changes nothing
        if types and concerned_types and not set(types) & set(concerned_types):
            continue
        if keyword in REQUIRES_NOTHING and REQUIRES_NOTHING[keyword] == value:
            continue
        ignored.append(keyword)
    return ignored


def _why_ignored(keyword: str, schema: Mapping[str, Any]) -> str:
    first = _first_read(schema)
    if keyword in NEVER_ENFORCED:
        return f"{keyword} cannot be enforced"
    if first != "type":
        return f"{keyword} beside {first} cannot be enforced"
    return f"{keyword} cannot be enforced without the type {' or '.join(_types_with(keyword))}"


def _types_with(keyword: str) -> tuple[str, ...]:
    return tuple(name for name, keywords in BY_TYPE.items() if keyword in keywords)


def _enforced_keywords(schema: Mapping[str, Any]) -> set[str]:
    """Return the keywords of a schema that xgrammar reads."""
    first = _first_read(schema)
    if first == "type":
        keywords = {"type"}
        for name in types_of(schema):
            keywords.update(BY_TYPE.get(name, ()))
        return keywords
    return {first, "type"} if _implies_type(schema, first) else {first}


def _first_read(schema: Mapping[str, Any]) -> str:
    return next((keyword for keyword in READ_FIRST if keyword in schema), "type")


def _implies_type(schema: Mapping[str, Any], keyword: str) -> bool:
    """Return whether all values that a keyword allows have a type that the schema names beside it."""
    types = types_of(schema)
    if keyword == "const":
        return _type_of(schema["const"]) in types
    values = schema[keyword]
    if not isinstance(values, list):
        return False
    if keyword == "enum":
        return all(_type_of(value) in types for value in values)
    return all(isinstance(value, dict) and types_of(value) == types for value in values)


def _type_of(value: Any) -> str:
    return TYPE_OF_VALUE.get(type(value), "null")


def _refuse_pattern(path: str, schema: Mapping[str, Any]) -> None:
    """Refuse a pattern that matches characters that JSON must escape."""
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and ESCAPED_IN_JSON.search(NEGATED_CLASS.sub("", pattern)):
        _refuse(path, "its pattern has a quote, a backslash or a control character, which JSON escapes")


def refuse_without_answers(schema: Mapping[str, Any]) -> None:
    """Refuse a schema with a part that no finite answer fits, such as a definition that only refers to itself.

    Otherwise the policy could come to a place where no token is allowed, or its answer would never end.

    Raises:
        RequestRefused: There is such a part, and the message names it; or xgrammar would ignore a reference.
    """
    parts = _with_targets(schema)
    # A schema has an answer if the schemas that it requires have one. Each round of the loop finds further schemas with
    # an answer
    answerable: set[int] = set()
    num_before = -1
    while num_before < len(answerable):
        num_before = len(answerable)
        for part in parts.values():
            if id(part) not in answerable and _has_answer(part, schema, answerable):
                answerable.add(id(part))
    paths = [path for path, part in parts.items() if id(part) not in answerable]
    if paths:
        # Name the longest path. The schemas around it have no answer only because this one has none
        _refuse(max(paths, key=len), "no finite answer fits it")


def _with_targets(root: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return all schemas in a schema, and the targets of their references, by path.

    Raises:
        RequestRefused: A reference is one that xgrammar would ignore.
    """
    parts: dict[str, Mapping[str, Any]] = dict(schemas_in(root))
    waiting = list(parts.items())
    while waiting:
        path, part = waiting.pop()
        reference = part.get("$ref")
        if not isinstance(reference, str):
            continue
        if reference != "#" and not reference.startswith("#/"):
            _refuse(path, f"it refers to another document or to an anchor, {reference[:100]!r}")
        # The target may be in a place where this module expects no schemas, so add its path separately
        target_path = reference.removeprefix("#")
        if target_path not in parts:
            for inner_path, inner_part in schemas_in(target_of(root, reference), target_path):
                parts[inner_path] = inner_part
                waiting.append((inner_path, inner_part))
    return parts


def _has_answer(schema: Mapping[str, Any], root: Any, answerable: set[int]) -> bool:
    """Return whether an answer fits a schema.

    Args:
        schema: The schema.
        root: The whole schema, to which references refer.
        answerable: Identities of the schemas that are already known to have a fitting answer.
    """
    if "$ref" in schema:
        reference = schema["$ref"]
        return not isinstance(reference, str) or _is_known(target_of(root, reference), answerable)
    if "const" in schema or "enum" in schema:
        return True
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list):
            return any(_is_known(branch, answerable) for branch in branches)
    if schema.get("type") == []:
        return False
    types = types_of(schema)
    return not types or any(_has_answer_of(name, schema, answerable) for name in types)


def _has_answer_of(type_name: str, schema: Mapping[str, Any], answerable: set[int]) -> bool:
    """Return whether an answer of one type fits a schema. See `_has_answer`."""
    parts: list[Any] = []
    if type_name == "object":
        properties = schema.get("properties")
        required = schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            parts = [properties.get(str(name)) for name in required]
    if type_name == "array":
        first_items = schema.get("prefixItems")
        parts = list(first_items) if isinstance(first_items, list) else []
        if schema.get("minItems"):
            parts.append(schema.get("items"))
    return all(_is_known(part, answerable) for part in parts)


def _is_known(schema: Any, answerable: set[int]) -> bool:
    # `true` allows every answer, and anything that is not an object is no schema; xgrammar itself refuses `false`
    return not isinstance(schema, dict) or id(schema) in answerable


def with_lengths_as_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a schema in which patterns express the lengths of strings.

    For `minLength` and `maxLength`, xgrammar allows control characters, which are no valid JSON. Longer lengths than
    MAX_REPEATS stay as they are.

    >>> with_lengths_as_patterns({"type": "string", "minLength": 2}).keys()
    dict_keys(['type', 'pattern'])
    """
    copied: dict[str, Any] = copy.deepcopy(schema)
    for _, part in schemas_in(copied):
        has_pattern = "pattern" in part or "format" in part
        pattern = None if has_pattern else _pattern_of_lengths(part)
        if pattern is not None:
            part.pop("minLength", None)
            part.pop("maxLength", None)
            part["pattern"] = pattern
    return copied


def _pattern_of_lengths(schema: Mapping[str, Any]) -> str | None:
    """Return a pattern for the lengths of a string.

    It is None if the schema has no lengths, or if a pattern cannot express them, so that xgrammar has to enforce them.
    """
    lengths = [schema[keyword] for keyword in ("minLength", "maxLength") if keyword in schema]
    if "string" not in types_of(schema) or not lengths:
        return None
    if not all(type(length) is int and 0 <= length <= MAX_REPEATS for length in lengths):
        return None
    shortest = schema.get("minLength", 0)
    longest = schema.get("maxLength", "")
    if longest != "" and longest < shortest:
        return None
    return f"^{CHARACTER}{{{shortest},{longest}}}$"


def _refuse(path: str, reason: str) -> None:
    raise RequestRefused(f"the schema{f' at {path[:200]}' if path else ''}: {reason}")
