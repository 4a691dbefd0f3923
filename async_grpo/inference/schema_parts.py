"""The parts of a JSON schema: the schemas inside it, and the targets of its references."""

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords whose value is a schema, a list of schemas, or a table of schemas
ONE_SCHEMA = (
    "items",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
SEVERAL_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")


def schemas_in(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all schemas inside it that are objects, each with its path (a JSON pointer without `#`).

    Values that only look like schemas are left out, for example the values in `enum`.

    >>> [path for path, _ in schemas_in({"type": "array", "items": {"enum": [{"type": 1}]}})]
    ['', '/items']
    """
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in ONE_SCHEMA:
        yield from schemas_in(schema.get(keyword), f"{path}/{keyword}")
    for keyword in SEVERAL_SCHEMAS:
        values = schema.get(keyword)
        for index, value in enumerate(values if isinstance(values, list) else ()):
            yield from schemas_in(value, f"{path}/{keyword}/{index}")
    for keyword in NAMED_SCHEMAS:
        table = schema.get(keyword)
        for name, value in (table if isinstance(table, dict) else {}).items():
            yield from schemas_in(value, f"{path}/{keyword}/{name}")


def types_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types that a schema names or that its keywords imply; () if it allows all types.

    >>> types_of({"properties": {}})
    ('object',)
    """
    types = schema.get("type")
    if isinstance(types, str):
        return (types,)
    if isinstance(types, list):
        return tuple(str(name) for name in types)
    # Without a type, xgrammar treats these keywords as if the type of objects stood beside them
    if "properties" in schema or "additionalProperties" in schema:
        return ("object",)
    if "items" in schema or "prefixItems" in schema:
        return ("array",)
    return ()


def target_of(root: Any, reference: str) -> Any:
    """Return the schema to which a reference such as `#/$defs/person` refers; None if there is none.

    >>> target_of({"$defs": {"age": {"type": "integer"}}}, "#/$defs/age")
    {'type': 'integer'}
    """
    target = root
    for name in reference.split("/")[1:]:
        if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict):
            target = target.get(name)
        else:
            return None
    return target
