"""Checks whether a completion is JSON that satisfies a schema, which is the row's `schema` or else the option `schema`.

The JSON value is the last block fenced as ```json, after the thought, or else the last block without a language. Without
such a block, it is the text of the only <answer> block at the end, or else all text after the thought. It is read strictly:
NaN, Infinity, numbers beyond the range of a float, duplicate names in an object, and any other text around the value are
errors.
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
from async_grpo.rewards.builtin.answers import answering_part, completion_text, fenced_blocks

MAX_CHARACTERS = 200_000  # maximum length of the JSON text; a longer text gets the reward 0
SECONDS = 2.0  # maximum time of one validation


@lru_cache(maxsize=1024)
def validator_of(schema_text: str) -> Validator:
    """Return the validator of a schema.

    Raises:
        ValueError: The text is not a JSON schema.
    """
    try:
        schema = json.loads(schema_text)
        validator_class = validator_for(schema, default=Draft202012Validator)
        validator_class.check_schema(schema)
    except (ValueError, SchemaError, AttributeError, TypeError) as error:
        raise ValueError(f"no JSON schema: {error!s:.200}: {schema_text:.200}") from error
    # The empty registry prevents the validator from loading a "$ref" over the network
    return validator_class(schema, registry=Registry())


def score(sample: dict[str, Any], schema: Any = None) -> dict[str, float]:
    """Return the reward 1 for JSON that satisfies the schema and 0 otherwise, and in `parsed` whether it is JSON.

    Args:
        sample: The completion and its row.
        schema: The schema for rows without a `schema`: an object, a bool, or JSON text.

    Raises:
        ValueError: There is no schema, it is not a valid schema, or it refers to another document.
        TimeoutError: Validation takes too long, for example because of a pattern in the schema.

    >>> score({"completion": '{"a": 1}', "schema": {"required": ["a"]}}), score({"completion": "a"}, schema=True)
    ({'reward': 1.0, 'parsed': 1.0}, {'reward': 0.0, 'parsed': 0.0})
    """
    schema = sample.get("schema", schema)
    if schema is None:
        raise ValueError("`json_schema` needs a column or an option `schema`")
    validator = validator_of(schema if isinstance(schema, str) else json.dumps(schema))
    text = answering_part(completion_text(sample).rpartition("</think>")[2])
    blocks = fenced_blocks(text)
    json_blocks = [content for language, content in blocks if language == "json"]
    plain_blocks = [content for language, content in blocks if not language]
    if json_blocks or plain_blocks:
        text = (json_blocks or plain_blocks)[-1]
    if len(text) > MAX_CHARACTERS:
        return {"reward": 0.0, "parsed": 0.0}
    try:
        value = json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=unique_names)
    except (ValueError, RecursionError):
        return {"reward": 0.0, "parsed": 0.0}
    try:
        with interrupted_after(SECONDS, "validation"):
            return {"reward": float(validator.is_valid(value)), "parsed": 1.0}
    except RecursionError:
        # The value is nested too deeply to be validated
        return {"reward": 0.0, "parsed": 1.0}
    except Unresolvable as error:
        raise ValueError(f"the schema has a reference to something outside of it: {error}") from error
