"""How a dataclass field becomes an option, and how `name=value,...` is read."""

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from async_grpo.errors import ConfigurationError


def option(default: Any, help: str, panel: str = "Run") -> Any:
    """A dataclass field that is also a command line option."""
    return field(default=default, metadata={"help": help, "panel": panel})


def required(help: str, panel: str = "Run") -> Any:
    """A field without a default."""
    return field(metadata={"help": help, "panel": panel})


def parse_assignments(text: str, flag: str) -> dict[str, Any]:
    """`name=value,name=value` -> a dict; numbers and true/false/none become what they say.

    >>> parse_assignments("cap=5, cap_mode=clamp, normalize=false", "loss-options")
    {'cap': 5.0, 'cap_mode': 'clamp', 'normalize': False}
    """
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        refuse(not (name and equals and value), f"--{flag} {text!r}: {part!r} is not name=value")
        refuse(name in found, f"--{flag} {text!r}: {name} is given twice")
        found[name] = _value(value)
    return found


def parse_numbers(text: str, flag: str) -> dict[str, float]:
    """`name=number,...` -> a dict.

    >>> parse_numbers("judge=0.5,rule=2", "reward-weights")
    {'judge': 0.5, 'rule': 2.0}
    """
    found = parse_assignments(text, flag)
    for name, value in found.items():
        refuse(not _is_number(value), f"--{flag} {text!r}: {name}={value} is no finite number")
    return found


def typed_options(given: Mapping[str, Any], defaults: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The options, if each exists and is of the kind that its default is.

    >>> typed_options({"gamma": 0.9}, {"gamma": 1.0, "whiten": True}, "the estimator gae")
    {'gamma': 0.9}
    """
    for name, value in given.items():
        refuse(name not in defaults, f"{owner} has no option {name}; it has {', '.join(defaults) or 'none'}")
        match defaults[name]:
            case bool():
                refuse(not isinstance(value, bool), f"{owner}: {name}={value} must be true or false")
            case int() | float():
                refuse(not _is_number(value), f"{owner}: {name}={value} is no finite number")
            case str():
                refuse(not isinstance(value, str), f"{owner}: {name}={value} must be a word")
            case None:
                refuse(value is not None and not _is_number(value), f"{owner}: {name}={value} is no number")
    return dict(given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _value(text: str) -> Any:
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return float(text)
    except ValueError:
        return text


def dashed(name: str) -> str:
    return name.replace("_", "-")


def refuse(condition: bool, message: str) -> None:
    """Raise ConfigurationError with the message if the condition holds."""
    if condition:
        raise ConfigurationError(message)
