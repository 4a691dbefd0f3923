"""`FlagsWithoutType`: a base class of commands, so that `--help` does not write <bool> beside flags."""

from typing import Any


class FlagsWithoutType:
    """Base class of commands.

    For flags such as `--help`, Typer would write the type <bool> in the help; this class removes it.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the command. The help shows no type for those that are flags."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters
