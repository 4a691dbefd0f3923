"""All commands by name, `typer_command` for `__main__`, and `run_program` for `launch.trainer` and `launch.worker`."""

from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from async_grpo.options.command_line import group_of, options_command, run_app
from async_grpo.options.log_setup import set_up_logging
from async_grpo.options.option_file import packages_of_fields

# Titles under which `async-grpo --help` groups the commands
RUN = "Train"
LOOK = "Look at a run"
CHECK = "Check, evaluate, export"


class Command(NamedTuple):
    """A command of `async-grpo`."""

    module: str
    help: str
    panel: str
    config: str = ""  # name of the dataclass of its options; "" if the module defines a Typer app instead
    run: str = ""  # name of the function that takes the configuration and runs the command


COMMANDS = {
    "run": Command(
        "async_grpo.launch.local_run",
        "Start Ray, workers and trainer on this machine, and wait for the end of the run.",
        RUN,
        config="LocalConfig",
        run="run_locally",
    ),
    "demo": Command(
        "async_grpo.launch.demo",
        "Train a tiny or a small real model (--model smollm2) and show what it learned. Needs no GPU.",
        RUN,
        config="DemoConfig",
        run="demo",
    ),
    "train": Command(
        "async_grpo.launch.trainer",
        "Train on an existing Ray cluster with one rank; for more ranks use torchrun -m async_grpo.launch.trainer.",
        RUN,
        config="RunConfig",
        run="run",
    ),
    "worker": Command(
        "async_grpo.launch.worker",
        "Run one generation or logprob worker on an existing Ray cluster.",
        RUN,
        config="WorkerConfig",
        run="run",
    ),
    "replay": Command(
        "async_grpo.launch.replay",
        "Train again on the samples that a run with --record stored: replay RUN [--from-step K] [options].",
        RUN,
        config="ReplayConfig",
        run="replay",
    ),
    "status": Command(
        "async_grpo.observe.status",
        "Show what a run does now: steps, speed, what each part waits for, rewards, evaluations, alarms.",
        LOOK,
        config="StatusConfig",
        run="status",
    ),
    "why": Command(
        "async_grpo.observe.why",
        "Show what a stalled run is waiting for, or how a run ended.",
        LOOK,
        config="WhyConfig",
        run="why",
    ),
    "watch": Command(
        "async_grpo.observe.watch",
        "Show a run on a web page, while it runs and after its end: watch RUN [--port 8765].",
        LOOK,
        config="WatchConfig",
        run="watch",
    ),
    "samples": Command(
        "async_grpo.observe.samples",
        "Write a run's samples to a page for the browser: samples RUN -o samples.html.",
        LOOK,
        config="SamplesConfig",
        run="write_samples_page",
    ),
    "plot": Command(
        "async_grpo.observe.plot",
        "Draw the metrics of runs, or list them: plot FILE..., plot compare|forecast|staleness|timeline|info RUN...",
        LOOK,
    ),
    "doctor": Command(
        "async_grpo.launch.doctor",
        "Check everything that can be checked before a run: doctor [run.toml] [options of run]. Exit code 2 if the run "
        "could not work.",
        CHECK,
        config="DoctorConfig",
        run="doctor",
    ),
    "verify": Command(
        "async_grpo.launch.verify",
        "Try rewards on a file of completions: scores, latencies, failures, disagreements. Exit code 1 if a reward "
        "failed on any row, 2 if the file or an option is wrong.",
        CHECK,
        config="VerifyConfig",
        run="verify",
    ),
    "try-environment": Command(
        "async_grpo.launch.try_environment",
        "Play one trajectory of an environment, and print it turn by turn: try-environment FILE.py:NAME [--say TEXT ...]. "
        "Exit code 1 if the trajectory failed.",
        CHECK,
        config="TryEnvironmentConfig",
        run="try_environment",
    ),
    "eval": Command(
        "async_grpo.launch.evaluate",
        "Evaluate a checkpoint or a model on its own: eval PATH --data NAME=FILE --reward-fns countdown.",
        CHECK,
        config="EvalConfig",
        run="evaluate",
    ),
    "export": Command(
        "async_grpo.launch.export",
        "Write the model of a checkpoint in the Hugging Face format.",
        CHECK,
        config="ExportConfig",
        run="export",
    ),
    "cache": Command(
        "async_grpo.launch.cache",
        "Show what a verdict cache holds, and prune it.",
        CHECK,
        config="CacheConfig",
        run="inspect_cache",
    ),
    "data": Command(
        "async_grpo.data.commands",
        "Make training data or a small real model: data countdown, data gsm8k, data capitals, data model.",
        CHECK,
    ),
}


def typer_command(name: str) -> Any:
    """Import the module of a command, and return the Typer command with its options."""
    command = COMMANDS[name]
    module = _imported(command.module)
    if not command.config:
        return group_of(module.app, name)

    def run(config: Any) -> None:
        set_up_logging(getattr(config, "logging_level", "INFO"))
        getattr(module, command.run)(config)

    return options_command(
        config_class(name),
        run,
        name=name,
        help=command.help,
        retired=getattr(module, "RETIRED", None),
        foreign=foreign_keys,
    )


def run_program(name: str, argv: Sequence[str] | None = None) -> None:
    """Run a command with the arguments `argv` (by default the arguments of this process), and exit."""
    run_app(typer_command(name), argv, f"async-grpo {name}")


def config_class(name: str) -> Any:
    """Return the dataclass of a command's options."""
    command = COMMANDS[name]
    return getattr(_imported(command.module), command.config)


def foreign_keys() -> dict[str, set[str]]:
    """Return all names that a configuration file may contain: options of `run` and `worker`, and `FACTS` of a run.

    Returns:
        For each name, the packages that define an option with this name. A file may have the option in a table that is
        named like such a package. Names of `FACTS` have no packages.
    """
    # Import this here, because `async-grpo --help` needs no configuration
    from async_grpo.config.run import FACTS

    packages_by_name: dict[str, set[str]] = {name: set() for name in FACTS}
    for command in ("run", "worker"):
        package_by_field = packages_of_fields(config_class(command))
        for field in fields(config_class(command)):
            for name in (field.name, *field.metadata["aliases"]):
                packages_by_name.setdefault(name, set()).add(package_by_field[field.name])
    return packages_by_name


def _imported(module: str) -> ModuleType:
    """Import a module. If a library that the module needs is missing or broken, exit with a message of one line."""
    try:
        return import_module(module)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # A torchvision that was built for another torch breaks the import of transformers. The commands do not need
        # torchvision, so it can be removed
        is_torchvision_broken = "torchvision" in str(cause)
        way_out = "see README.md"
        if is_torchvision_broken:
            way_out = "pip uninstall torchvision torchaudio torchcodec"
        raise SystemExit(f"error: {module} cannot be imported: {cause}: {way_out}") from error
