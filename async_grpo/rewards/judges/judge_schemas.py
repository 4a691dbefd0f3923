"""Checks the user's patterns and JSON schemas for a judge's replies, and validates replies within a time budget."""

import json
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.result import shown
from async_grpo.rewards.http.endpoint import require_all
from async_grpo.rewards.judges.reading import ReadingBudget

MATCH_S = 0.2  # limit of the processor time that a user's pattern takes on one text, in seconds
MAX_SHOWN_CHARACTERS = 200  # characters of an invalid text that an error message quotes

_Rule = Callable[[Any, Any, Any, Any], Any]
_budget: ContextVar[ReadingBudget] = ContextVar("budget of the validation that runs in this thread")


def breach_of(value: Any, schema: Mapping[str, Any], budget: ReadingBudget) -> str | None:
    """Return the error message of the first schema rule that the value violates, or None if the value is valid.

    Raises:
        TimeoutError: The budget is spent, or a pattern takes too long.
    """
    token = _budget.set(budget)
    try:
        breach = next(_validator_of(json.dumps(schema)).iter_errors(value), None)
    finally:
        _budget.reset(token)
    return None if breach is None else breach.message


@lru_cache(maxsize=64)
def _validator_of(schema_text: str) -> Any:
    """Return a validator for a schema that `check_reading` accepted. It loads no references from the network."""
    import jsonschema
    import regex
    from referencing import Registry

    def pattern_rule(validator: Any, pattern: str, value: Any, schema: Any) -> Any:
        """Check the schema keyword `pattern` with `regex`, which has a time limit, unlike `re`."""
        timeout_s = min(MATCH_S, _budget.get().left_s())
        if isinstance(value, str) and not regex.search(pattern, value, timeout=timeout_s):
            yield jsonschema.ValidationError(
                f"{shown(value, MAX_SHOWN_CHARACTERS)} does not match {pattern!r}"
            )

    draft = jsonschema.Draft202012Validator
    check_multiple = draft.VALIDATORS["multipleOf"]

    def multiple_rule(validator: Any, argument: Any, value: Any, schema: Any) -> Any:
        """Check the schema keyword `multipleOf`. jsonschema cannot check integers beyond the range of a float."""
        try:
            yield from check_multiple(validator, argument, value, schema) or ()
        except OverflowError:
            yield jsonschema.ValidationError(f"a number is too large to be a multiple of {argument!r}")

    rules = {name: _stoppable(rule) for name, rule in draft.VALIDATORS.items()}
    rules["pattern"] = pattern_rule
    rules["multipleOf"] = multiple_rule
    schema = json.loads(schema_text, object_hook=_without_dialect)
    return jsonschema.validators.extend(draft, rules)(schema, registry=Registry())


def _stoppable(rule: _Rule) -> _Rule:
    """Wrap a validator's rule so that it checks the time budget before it starts."""

    def rule_within_budget(validator: Any, argument: Any, value: Any, schema: Any) -> Any:
        _budget.get().left_s()
        return rule(validator, argument, value, schema)

    return rule_within_budget


def _without_dialect(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove `$schema` from a part of a schema, because it would make jsonschema use its own rules instead of ours."""
    return {name: value for name, value in schema.items() if name != "$schema" or not isinstance(value, str)}


def check_reading(pattern: str | None, schema: Mapping[str, Any] | None, score_key: str) -> None:
    """Check the settings that define how the score is read from a judge's reply.

    Raises:
        ConfigurationError: The pattern is invalid or does not have exactly one group. Or the schema is invalid, does
            not require the score, or contains a rule or reference that `_check_schema` refuses.
    """
    if pattern is not None:
        _check_pattern(pattern)
    if schema is not None:
        _check_schema(schema, score_key)


def _check_pattern(pattern: str) -> None:
    import regex

    try:
        groups = re.compile(pattern).groups
        # Replies are matched with `regex`, whose syntax differs from that of `re`, for example in `{e}`
        regex.compile(pattern)
    except (re.error, regex.error) as error:
        raise ConfigurationError(f"pattern={pattern!r} cannot be read: {error}") from error
    require_all((groups == 1, f"{pattern=} has {groups} groups: the score must be the only one"))


def _check_schema(schema: Mapping[str, Any], score_key: str) -> None:
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(dict(schema))
    except jsonschema.SchemaError as error:
        raise ConfigurationError(f"json_schema is no JSON schema: {error.message}") from error
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    has_endless_rule = _has_rule(schema, lambda part: "patternProperties" in part)
    has_quadratic_rule = _has_rule(schema, lambda part: part.get("uniqueItems") is True)
    require_all(
        (
            score_key in properties and score_key in required,
            f"json_schema must have the property {score_key=}, and require it; it has {sorted(properties)}",
        ),
        (
            not has_endless_rule,
            "json_schema holds patternProperties: matching a judge's reply could take forever: name the properties",
        ),
        (
            not has_quadratic_rule,
            "json_schema holds uniqueItems: comparing all items of a judge's reply may take minutes: leave it out",
        ),
    )
    _check_references(schema, score_key)


def _check_references(schema: Mapping[str, Any], score_key: str) -> None:
    """Check that all references point to parts of the schema and do not form an endless loop.

    Raises:
        ConfigurationError: A reference points elsewhere, or following it never ends.
    """
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY

    resource = DRAFT202012.create_resource(json.loads(json.dumps(schema), object_hook=_without_dialect))
    # The empty registry resolves no references to other schemas, not even to the schemas of JSON Schema itself, because
    # these could contain rules that `_check_schema` refuses
    waiting = [(resource, EMPTY_REGISTRY.resolver_with_root(resource))]
    checked: set[int] = set()
    reference = ""
    try:
        while waiting:
            part, resolver = waiting.pop()
            if id(part.contents) in checked or not isinstance(part.contents, dict):
                continue
            checked.add(id(part.contents))
            for name in ("$ref", "$dynamicRef"):
                if isinstance(part.contents.get(name), str):
                    reference = part.contents[name]
                    target = resolver.lookup(reference)
                    waiting.append((DRAFT202012.create_resource(target.contents), target.resolver))
            for inner in part.subresources():
                waiting.append((inner, resolver.in_subresource(inner)))
        breach_of({score_key: 0}, schema, ReadingBudget())
    except Unresolvable as error:
        raise ConfigurationError(
            f"json_schema refers to {reference!r}, which is not in it: write that part under $defs"
        ) from error
    except RecursionError as error:
        raise ConfigurationError(
            "json_schema refers to itself without an end: a recursive reference must be inside a property"
        ) from error


def _has_rule(schema: Any, is_in: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Return whether `is_in` is true for any part of the schema."""
    if isinstance(schema, Mapping):
        return is_in(schema) or any(_has_rule(part, is_in) for part in schema.values())
    return isinstance(schema, list | tuple) and any(_has_rule(part, is_in) for part in schema)
