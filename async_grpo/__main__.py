"""The console script `async-grpo`: a whole run, the demo, its parts, and tools, each from one command."""

import sys
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import typer

from async_grpo import __version__
from async_grpo.config.run import FACTS
from async_grpo.data import create_count_down, create_gsm8k
from async_grpo.options.command_line import run_command, set_up_logging


class Command(NamedTuple):
    """Where a command lives, and its dataclass of options; without one it parses its arguments itself."""

    help: str
    module: str
    config: str | None = None
    run: str = "main"


COMMANDS = {
    "run": Command(
        "Start Ray, workers and trainer on this machine, and wait for the end of the run.",
        *("async_grpo.launch.local_run", "LocalConfig", "run_locally"),
    ),
    "demo": Command(
        "Train the tiny model on countdown tasks and show what it learned. Needs no GPU.",
        *("async_grpo.launch.demo", "DemoConfig", "demo"),
    ),
    "train": Command(
        "Train on a Ray cluster that runs already, as one rank; several: torchrun -m async_grpo.programs.trainer.",
        *("async_grpo.programs.trainer", "RunConfig", "run"),
    ),
    "worker": Command(
        "Run one generation or logprob worker on a Ray cluster that runs already.",
        *("async_grpo.programs.worker", "WorkerConfig", "run"),
    ),
    "verify": Command(
        "Try rewards on a file of completions: scores, latencies, failures, disagreements. Exit code 1 if a reward "
        "failed on any row, 2 if the file or an option is wrong.",
        *("async_grpo.programs.verify", "VerifyConfig", "verify"),
    ),
    "cache": Command(
        "Show what a verdict cache holds, and prune it.",
        *("async_grpo.programs.cache", "CacheConfig", "inspect_cache"),
    ),
    "doctor": Command(
        "Try all that can be tried before a run: doctor [run.toml] [options of run]. Exit code 2 if one could not work.",
        *("async_grpo.programs.doctor", "DoctorConfig", "doctor"),
    ),
    "status": Command(
        "Show what a run does now: steps, pace, who waits for what, rewards, evaluations, alarms.",
        *("async_grpo.programs.status", "StatusConfig", "status"),
    ),
    "why": Command(
        "Show who holds up a run that stands still, or how a run ended.",
        *("async_grpo.programs.why", "WhyConfig", "why"),
    ),
    "watch": Command(
        "Show a run on a page for the browser, live and after its end: watch RUN [--port 8765].",
        *("async_grpo.programs.watch", "WatchConfig", "watch"),
    ),
    "samples": Command(
        "Look at a run's samples: one page to open in a browser, samples RUN -o samples.html.",
        *("async_grpo.programs.samples", "SamplesConfig", "write_samples_page"),
    ),
    "export": Command(
        "Write the model of a checkpoint in the Hugging Face format.",
        *("async_grpo.programs.export", "ExportConfig", "export"),
    ),
    "eval": Command(
        "Evaluate a checkpoint or a model on its own: eval PATH --data NAME=FILE --reward-fns countdown.",
        *("async_grpo.launch.evaluate", "EvalConfig", "evaluate"),
    ),
    "replay": Command(
        "Train again from what a run with --record was trained on: replay RUN [--from-step K] [options].",
        "async_grpo.programs.replay",
    ),
    "plot": Command(
        "Draw the metrics of runs, or list them: plot FILE..., plot compare|forecast|staleness|timeline|info RUN...",
        "async_grpo.programs.plot",
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (default: the program's own), and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"async-grpo {__version__}")
        raise SystemExit
    if arguments and arguments[0] in COMMANDS:
        run_program(arguments[0], arguments[1:])
        return
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
    )

    @app.callback()
    def options(
        version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    ) -> None:
        """Asynchronous GRPO on one machine or many."""

    for name, command in COMMANDS.items():
        app.command(name, help=command.help)(lambda: None)
    data = typer.Typer(
        help="Make training data for a tokenizer: data countdown, data gsm8k.", no_args_is_help=True
    )
    data.command("countdown")(create_count_down.main)
    data.command("gsm8k")(create_gsm8k.main)
    app.add_typer(data, name="data")
    app(args=arguments, prog_name="async-grpo")


def run_program(name: str, argv: list[str] | None = None) -> None:
    """Run the command of that name with `argv` (default: the program's own), and exit."""
    command, program = COMMANDS[name], f"async-grpo {name}"
    module = _imported(command.module)
    if command.config is None:
        getattr(module, command.run)(argv, program)
        return

    def run(config: Any) -> None:
        set_up_logging(getattr(config, "logging_level", "INFO"))
        getattr(module, command.run)(config)

    told: Any = {"help": command.help, "retired": getattr(module, "RETIRED", None), "program": program}
    run_command(config_class(name), run, argv=argv, foreign=foreign_keys, **told)


def config_class(name: str) -> Any:
    """The dataclass that the command's options are made from."""
    command = COMMANDS[name]
    return getattr(_imported(command.module), str(command.config))


def foreign_keys() -> set[str]:
    """What a configuration file may hold for other programs than the one that reads it."""
    found = {*FACTS}
    for field in (field for name in ("run", "worker") for field in fields(config_class(name))):
        found |= {field.name, field.metadata["was"], field.metadata["also"]}
    return found


def _imported(name: str) -> ModuleType:
    """The module; exits with the cause in one line where a library below it is missing or broken."""
    try:
        return import_module(name)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        broken = "torchvision" in str(cause)  # built for another torch, and nothing here needs it
        way_out = (
            "pip uninstall torchvision torchaudio torchcodec" if broken else "see README.md on installing"
        )
        raise SystemExit(f"error: {name} cannot be imported: {cause}: {way_out}") from error


if __name__ == "__main__":
    main()
