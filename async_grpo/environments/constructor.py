"""Check the options of an environment against the arguments of its constructor, before a run starts."""

import inspect
from collections.abc import Mapping
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.options.fields import nearest

KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def check_constructor_options(player: Any, options: Mapping[str, Any]) -> None:
    """Check that an environment can be made with these options.

    Args:
        player: What `--environment` names: a class, a list of tools or a program. Only a class takes options.
        options: The values of `--environment-options`, by name.

    Raises:
        ConfigurationError: The constructor does not take an option, or needs one that is not given.
    """
    if not isinstance(player, type):
        if options:
            raise ConfigurationError(
                f"--environment-options {', '.join(options)}: tools and programs take no options, only a class does: "
                "leave them out, or write a class with reset and step"
            )
        return
    try:
        parameters = list(inspect.signature(player).parameters.values())
    except (TypeError, ValueError):
        # Classes that are written in C may have no signature. Their constructor itself refuses wrong options
        return
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named_parameters = [parameter for parameter in parameters if parameter.kind in KEYWORD_KINDS]
    names = [parameter.name for parameter in named_parameters]
    unknown = [name for name in options if name not in names]
    if unknown and not takes_any_name:
        accepted = f"it takes {', '.join(names)}" if names else "it takes none"
        raise ConfigurationError(
            f"--environment-options {unknown[0]}: the environment {player.__name__} takes no option {unknown[0]}; "
            f"{accepted}{nearest(unknown[0], names)}"
        )
    missing = [
        parameter.name
        for parameter in named_parameters
        if parameter.default is parameter.empty and parameter.name not in options
    ]
    if missing:
        example = ",".join(f"{name}=VALUE" for name in missing)
        raise ConfigurationError(
            f"the environment {player.__name__} needs {', '.join(missing)}, which its constructor has no default for: "
            f"give --environment-options {example}"
        )
