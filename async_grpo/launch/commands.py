"""The commands by name, and `run_program`, by which `__main__` and the programs that torchrun starts run one."""

from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from async_grpo.config.run import FACTS
from async_grpo.options.command_line import run_command, set_up_logging


class Command(NamedTuple):
    """A command's help, its module, its dataclass of options and its function.

    A command without a dataclass of options (`config` is None) parses its arguments itself.
    """

    help: str
    module: str
    config: str | None = None
    run: str = "main"


HELP = {
    "run": "Start Ray, workers and trainer on this machine, and wait for the end of the run.",
    "demo": "Train the tiny model on countdown tasks and show what it learned. Needs no GPU.",
    "train": "Train on a Ray cluster that runs already, as one rank; several: torchrun -m async_grpo.launch.trainer.",
    "worker": "Run one generation or logprob worker on a Ray cluster that runs already.",
    "verify": "Try rewards on a file of completions: scores, latencies, failures, disagreements. "
    "Exit code 1 if a reward failed on any row, 2 if the file or an option is wrong.",
    "cache": "Show what a verdict cache holds, and prune it.",
    "doctor": "Try all that can be tried before a run: doctor [run.toml] [options of run]. "
    "Exit code 2 if one could not work.",
    "status": "Show what a run does now: steps, pace, who waits for what, rewards, evaluations, alarms.",
    "why": "Show who holds up a run that stands still, or how a run ended.",
    "watch": "Show a run on a page for the browser, live and after its end: watch RUN [--port 8765].",
    "samples": "Look at a run's samples: one page to open in a browser, samples RUN -o samples.html.",
    "export": "Write the model of a checkpoint in the Hugging Face format.",
    "eval": "Evaluate a checkpoint or a model on its own: eval PATH --data NAME=FILE --reward-fns countdown.",
    "replay": "Train again from what a run with --record was trained on: replay RUN [--from-step K] [options].",
    "plot": "Draw the metrics of runs, or list them: plot FILE..., plot compare|forecast|staleness|timeline|info RUN...",
}
PLACES = {  # module, dataclass of options, function
    "run": ("launch.local_run", "LocalConfig", "run_locally"),
    "demo": ("launch.demo", "DemoConfig", "demo"),
    "train": ("launch.trainer", "RunConfig", "run"),
    "worker": ("launch.worker", "WorkerConfig", "run"),
    "verify": ("launch.verify", "VerifyConfig", "verify"),
    "cache": ("launch.cache", "CacheConfig", "inspect_cache"),
    "doctor": ("launch.doctor", "DoctorConfig", "doctor"),
    "status": ("observe.status", "StatusConfig", "status"),
    "why": ("observe.why", "WhyConfig", "why"),
    "watch": ("observe.watch", "WatchConfig", "watch"),
    "samples": ("observe.samples", "SamplesConfig", "write_samples_page"),
    "export": ("launch.export", "ExportConfig", "export"),
    "eval": ("launch.evaluate", "EvalConfig", "evaluate"),
    "replay": ("launch.replay", "ReplayConfig", "replay"),
    "plot": ("observe.plot",),
}
COMMANDS = {
    name: Command(HELP[name], f"async_grpo.{module}", *config_and_function)
    for name, (module, *config_and_function) in PLACES.items()
}


def run_program(name: str, argv: list[str] | None = None) -> None:
    """Run a command with the arguments `argv` (the default is the program's own arguments), and exit."""
    command = COMMANDS[name]
    program = f"async-grpo {name}"
    module = _imported(command.module)
    if command.config is None:
        getattr(module, command.run)(argv, program)
        return

    def run(config: Any) -> None:
        set_up_logging(getattr(config, "logging_level", "INFO"))
        getattr(module, command.run)(config)

    run_command(
        config_class(name),
        run,
        argv=argv,
        help=command.help,
        program=program,
        retired=getattr(module, "RETIRED", None),
        foreign=foreign_keys,
    )


def config_class(name: str) -> Any:
    """Return the dataclass of a command's options."""
    command = COMMANDS[name]
    return getattr(_imported(command.module), str(command.config))


def foreign_keys() -> set[str]:
    """Return the option names that a configuration file may hold for programs other than the one that reads it."""
    names = {*FACTS}
    for command in ("run", "worker"):
        for field in fields(config_class(command)):
            names |= {field.name, field.metadata["also"]}
    return names


def _imported(name: str) -> ModuleType:
    """Import a module. If a library that it needs is missing or broken, exit with the cause in one line."""
    try:
        return import_module(name)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # A torchvision that was built for another torch breaks the import of transformers. Nothing here needs it
        is_torchvision = "torchvision" in str(cause)
        way_out = "pip uninstall torchvision torchaudio torchcodec" if is_torchvision else "see README.md"
        raise SystemExit(f"error: {name} cannot be imported: {cause}: {way_out}") from error
