"""The common parts of all rules between options: a broken rule is an error or a warning, whose message names a way out.

A rule yields the names of the options that break it, separated by spaces, and a message. The error prints each option
with its value, then the message.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import dashed

# For each broken rule: the names of its options, separated by spaces, and a message that is printed after their values
BrokenRules = Iterator[tuple[str, str]]


def refuse_broken(config: Any, broken: BrokenRules) -> None:
    """Raise ConfigurationError for the first broken rule, if any."""
    for flags, message in broken:
        raise ConfigurationError(_with_values(config, flags, message))


def idle(config: Any, flags: str, reason: str) -> BrokenRules:
    """Yield a broken rule if any of the options was changed although they have no effect.

    Args:
        config: The configuration.
        flags: Names of the options, separated by spaces.
        reason: Why the options have no effect, for the message.
    """
    changed = changed_options(config, flags.split())
    if changed:
        yield " ".join(changed), f"does nothing {reason}"


def changed_options(config: Any, names: Iterable[str]) -> list[str]:
    """Return the names whose options differ from their defaults."""
    fields = type(config).__dataclass_fields__
    return [name for name in names if getattr(config, name) != fields[name].default]


def warn(config: Any, broken: BrokenRules) -> None:
    """Print a warning for each broken rule, on rank 0."""
    for flags, message in broken:
        if os.environ.get("RANK", "0") == "0":
            print(f"warning: {_with_values(config, flags, message)}", file=sys.stderr, flush=True)


def _with_values(config: Any, flags: str, message: str) -> str:
    """Return the options with their values, followed by the message."""
    options = [f"--{dashed(name)} {getattr(config, name)}" for name in flags.split()]
    return " ".join([*options, message])
