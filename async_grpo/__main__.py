"""The console script `async-grpo`: a whole run, or the demo, from one command on one machine."""

import sys

import typer

from async_grpo.cli import as_function, normalized, set_up_logging
from async_grpo.demo import DemoConfig, demo
from async_grpo.local import LocalConfig, run_locally


def _run(config: LocalConfig) -> None:
    set_up_logging(config.logging_level)
    run_locally(config)


def _demo(config: DemoConfig) -> None:
    set_up_logging("INFO")
    demo(config)


COMMANDS = {
    "run": (
        LocalConfig,
        _run,
        "Start Ray, workers and trainer on this machine, and wait for the end of the run.",
    ),
    "demo": (
        DemoConfig,
        _demo,
        "Train the tiny model on countdown tasks and show what it learned. Needs no GPU.",
    ),
}


def main(argv: list[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
    )
    for name, (config_class, run, help) in COMMANDS.items():
        app.command(name, help=help)(as_function(config_class, run))
    if arguments and arguments[0] in COMMANDS:
        arguments[1:] = normalized(arguments[1:], COMMANDS[arguments[0]][0], {})
    app(args=arguments)


if __name__ == "__main__":
    main()
