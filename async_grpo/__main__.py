"""The program `async-grpo`, with one command for each task: a whole run, its parts, the demo, and tools."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from async_grpo.launch.commands import COMMANDS, typer_command
from async_grpo.options.command_line import run_app
from async_grpo.options.plain_flags import FlagsWithoutType
from async_grpo.options.version import VERSION


class Commands(FlagsWithoutType, TyperGroup):
    """All commands. A command's module is imported only when the command is called, because that may take seconds."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Build the options of the requested command, then resolve it as Click does."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = typer_command(args[0])
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(is_asked_for: bool) -> None:
    if is_asked_for:
        print(f"async-grpo {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Asynchronous GRPO on one machine or many."""


def _without_options() -> None:
    """Do nothing. This function is a placeholder that gives every command its line in `--help`.

    `Commands.resolve_command` replaces the placeholder by the real command before a command is called.
    """


for _name, _command in COMMANDS.items():
    app.command(_name, help=escape(_command.help), rich_help_panel=_command.panel)(_without_options)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv`, and exit. None means the arguments of this process."""
    run_app(typer.main.get_command(app), argv, "async-grpo")


if __name__ == "__main__":
    main()
