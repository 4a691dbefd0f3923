"""The completion is JSON, and fits a schema: the row's `schema`, else the option's.

Read strictly: no NaN or Infinity, no number beyond a float's range, no key twice in an object, and nothing beside the
value. The value is what is behind the thought, or the last block fenced as ```json (or without a language) there.
"""

import json
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from async_grpo.processes.deadline import interrupted_after
from async_grpo.rewards.adapter.result import finite, unique_names
from async_grpo.rewards.builtin.answers import completion_text, fenced_blocks

MAX_CHARACTERS = 200_000
SECONDS = 2.0


@lru_cache(maxsize=1024)
def validator_of(schema_text: str) -> Validator:
    """The validator for a schema in JSON. Raises ValueError if it is none."""
    try:
        schema = json.loads(schema_text)
        kind = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
    except (ValueError, SchemaError, AttributeError, TypeError) as error:
        raise ValueError(f"no JSON schema: {error!s:.200}: {schema_text:.200}") from error
    return kind(schema, registry=Registry())  # an empty one: a "$ref" into the network is not followed


def score(sample: dict[str, Any], schema: Any = None) -> dict[str, float]:
    """1 for JSON that fits the schema (a dict, a bool or JSON text), else 0; `parsed`: whether it was JSON at all.

    ValueError: there is no schema, it is none, or it refers to another document.
    TimeoutError: the schema's patterns did not come to an end on this value.

    >>> score({"completion": '{"a": 1}', "schema": {"required": ["a"]}}), score({"completion": "a"}, schema=True)
    ({'reward': 1.0, 'parsed': 1.0}, {'reward': 0.0, 'parsed': 0.0})
    """
    schema = sample.get("schema", schema)
    if schema is None:
        raise ValueError("`json_schema` needs a column or an option `schema`")
    validator = validator_of(schema if isinstance(schema, str) else json.dumps(schema))
    text = completion_text(sample).rpartition("</think>")[2]
    fenced = [content for language, content in fenced_blocks(text) if language in ("json", "")]
    text = fenced[-1] if fenced else text
    text = text if len(text) <= MAX_CHARACTERS else ""  # which is no JSON
    try:
        value = json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=unique_names)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "parsed": 0.0}
    try:
        with interrupted_after(SECONDS, "validation"):
            return {"reward": float(validator.is_valid(value)), "parsed": 1.0}
    except RecursionError:  # the value is too deep for the schema's rules
        return {"reward": 0.0, "parsed": 1.0}
    except Unresolvable as error:
        raise ValueError(f"the schema refers to what is not in it: {error}") from error
