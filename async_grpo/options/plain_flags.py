"""`FlagsWithoutType`: a base of commands whose `--help` shows flags without a type."""

from typing import Any


class FlagsWithoutType:
    """Base of commands whose `--help` shows no type for flags such as `--help`: Typer would write <bool> there."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters
