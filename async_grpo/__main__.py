"""The console script `async-grpo`: a whole run, the demo, its parts, and tools, each from one command."""

import sys
from typing import Annotated, Any

import typer

from async_grpo.data import create_count_down, create_gsm8k
from async_grpo.launch.commands import COMMANDS, run_program
from async_grpo.options.version import VERSION


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: the program's own), and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"async-grpo {VERSION}")
        raise SystemExit
    if arguments and arguments[0] in COMMANDS:
        run_program(arguments[0], arguments[1:])
        return
    plain: Any = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
    app = typer.Typer(add_completion=False, no_args_is_help=True, **plain)

    @app.callback()
    def options(
        version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    ) -> None:
        """Asynchronous GRPO on one machine or many."""

    for name, command in COMMANDS.items():
        app.command(name, help=command.help)(lambda: None)
    data = typer.Typer(help="Make training data: data countdown, data gsm8k.", no_args_is_help=True)
    data.command("countdown")(create_count_down.main)
    data.command("gsm8k")(create_gsm8k.main)
    app.add_typer(data, name="data")
    app(args=arguments, prog_name="async-grpo")


if __name__ == "__main__":
    main()
