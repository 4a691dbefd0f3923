"""The commands by name, and `run_program`, by which `__main__` and the programs that torchrun starts run one."""

from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from async_grpo.options.command_line import group_of, options_command, run_app
from async_grpo.options.log_setup import set_up_logging

# Panels of `async-grpo --help`
RUN = "Train"
LOOK = "Look at a run"
CHECK = "Check, evaluate, export"


class Command(NamedTuple):
    """A command of `async-grpo`."""

    module: str
    help: str
    panel: str
    config: str = ""  # dataclass of its options; without one, the module has a Typer app
    run: str = ""  # function that takes the configuration


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
        "Train the tiny model on countdown tasks and show what it learned. Needs no GPU.",
        RUN,
        config="DemoConfig",
        run="demo",
    ),
    "train": Command(
        "async_grpo.launch.trainer",
        "Train on a Ray cluster that runs already, as one rank; several: torchrun -m async_grpo.launch.trainer.",
        RUN,
        config="RunConfig",
        run="run",
    ),
    "worker": Command(
        "async_grpo.launch.worker",
        "Run one generation or logprob worker on a Ray cluster that runs already.",
        RUN,
        config="WorkerConfig",
        run="run",
    ),
    "replay": Command(
        "async_grpo.launch.replay",
        "Train again from what a run with --record was trained on: replay RUN [--from-step K] [options].",
        RUN,
        config="ReplayConfig",
        run="replay",
    ),
    "status": Command(
        "async_grpo.observe.status",
        "Show what a run does now: steps, pace, who waits for what, rewards, evaluations, alarms.",
        LOOK,
        config="StatusConfig",
        run="status",
    ),
    "why": Command(
        "async_grpo.observe.why",
        "Show who holds up a run that stands still, or how a run ended.",
        LOOK,
        config="WhyConfig",
        run="why",
    ),
    "watch": Command(
        "async_grpo.observe.watch",
        "Show a run on a page for the browser, live and after its end: watch RUN [--port 8765].",
        LOOK,
        config="WatchConfig",
        run="watch",
    ),
    "samples": Command(
        "async_grpo.observe.samples",
        "Look at a run's samples: one page to open in a browser, samples RUN -o samples.html.",
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
        "Try all that can be tried before a run: doctor [run.toml] [options of run]. Exit code 2 if one could not work.",
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
    "data": Command("async_grpo.data.commands", "Make training data: data countdown, data gsm8k.", CHECK),
}


def typer_command(name: str) -> Any:
    """Return the command of that name, with its options, for Typer."""
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
    """Run the command of that name with `argv` (default: the program's own), and exit."""
    run_app(typer_command(name), argv, f"async-grpo {name}")


def config_class(name: str) -> Any:
    """Return the dataclass of a command's options."""
    command = COMMANDS[name]
    return getattr(_imported(command.module), command.config)


def foreign_keys() -> set[str]:
    """Return the option names that a configuration file may hold for programs other than the one that reads it."""
    # Imported late, because `async-grpo --help` needs none of the configurations
    from async_grpo.config.run import FACTS

    names = set(FACTS)
    for command in ("run", "worker"):
        for field in fields(config_class(command)):
            names.update([field.name, *field.metadata["aliases"]])
    return names


def _imported(module: str) -> ModuleType:
    """Import a module. If a library that it needs is missing or broken, exit with the cause in one line."""
    try:
        return import_module(module)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # A torchvision that was built for another torch breaks the import of transformers. Nothing here needs it
        is_torchvision_broken = "torchvision" in str(cause)
        way_out = "see README.md"
        if is_torchvision_broken:
            way_out = "pip uninstall torchvision torchaudio torchcodec"
        raise SystemExit(f"error: {module} cannot be imported: {cause}: {way_out}") from error
