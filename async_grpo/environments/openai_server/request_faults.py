"""Checks the fields of a request, and describes everything that is wrong with them."""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from async_grpo.environments.openai_server.unsupported_fields import HINTS, UNSUPPORTED, unsupported_fields

# Limit for the description of an error, and for the name of a field in it, because a request may invent any name
MAX_FAULT_CHARACTERS = 300
MAX_FAULTS = 16  # faults in one description
# Names of types that pydantic adds to the place of an error if a value may have one of several types
_TYPES = ("str", "constrained-str", "NamedTool", "ChosenFunction", "input_text", "output_text", "input_image")
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
_TYPE_BEGINNINGS = ("list[", "dict[", "literal[")

_LENGTH_FAULTS = ("too_long", "too_short", "string_too_long")

_Model = TypeVar("_Model", bound=BaseModel)


def validated(
    model_type: type[_Model],
    fields: Any,
    hints: Mapping[str, str] = HINTS,
    unsupported: Mapping[str, str] = UNSUPPORTED,
) -> _Model:
    """Return a request with these fields.

    Args:
        model_type: The type of the request.
        fields: The parsed body of the request.
        hints: Supported values, by the name of a field.
        unsupported: Reasons why fields are not supported, by the name of a field.

    Raises:
        HTTPBadRequest: Fields are wrong or not supported. The text describes the faults of all of them.
    """
    faults = unsupported_fields(fields, unsupported) if isinstance(fields, dict) else []
    try:
        request = model_type.model_validate(fields)
    except ValidationError as error:
        faults = [*_faults_of(error, hints), *faults]
    else:
        if not faults:
            return request
    raise web.HTTPBadRequest(text="; ".join(faults[:MAX_FAULTS]))


def _faults_of(error: ValidationError, hints: Mapping[str, str]) -> Iterator[str]:
    """Yield a description of what is wrong with each field of a request.

    If a value may have several types, pydantic reports one error for each type. Only one error is described: an error
    about the length, because it is the most helpful, or else the error that is nested deepest in the field.
    """
    errors_by_field: dict[Any, list[Any]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        field_name = fault["loc"][0] if fault["loc"] else ""
        errors_by_field.setdefault(field_name, []).append(fault)
    for faults in errors_by_field.values():
        length_faults = [fault for fault in faults if fault["type"] in _LENGTH_FAULTS]
        fault = max(length_faults or faults, key=lambda fault: len(fault["loc"]))
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "union_tag_invalid":
            message = f"the type {fault['ctx']['tag']!r} is not supported"
        place = [str(part) for part in fault["loc"] if not _is_type(part)]
        field_name = ".".join(place) or "the request"
        place_hints = [hints[part] for part in place if part in hints]
        advice = f" ({place_hints[-1]})" if place_hints else ""
        yield f"{field_name[:MAX_FAULT_CHARACTERS]}: {message[:MAX_FAULT_CHARACTERS]}{advice}"


def _is_type(part: int | str) -> bool:
    return isinstance(part, str) and (part in (*_TYPES, *_ITEM_TYPES) or part.startswith(_TYPE_BEGINNINGS))
