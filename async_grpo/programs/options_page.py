"""`docs/options.md`, made from the options themselves: `python -m async_grpo.programs.options_page > docs/options.md`."""

import dataclasses
from importlib import import_module
from typing import Any

from async_grpo.config.run import FACTS
from async_grpo.options.command_line import EVERYDAY, fields_in_order, help_of
from async_grpo.options.fields import dashed

PROGRAMS = {
    "async-grpo run": "async_grpo.launch.local_run:LocalConfig",
    "async-grpo train, trainer_core.py": "async_grpo.config.run:RunConfig",
    "async-grpo worker, worker_dispatcher.py": "async_grpo.config.run:WorkerConfig",
    "async-grpo demo": "async_grpo.launch.demo:DemoConfig",
    "async-grpo verify": "async_grpo.programs.verify:VerifyConfig",
    "async-grpo cache": "async_grpo.programs.cache:CacheConfig",
}
HEAD = """# Options

Made by `python -m async_grpo.programs.options_page > docs/options.md`; a test holds it current.

Every option can stand on the command line (`--batch-size 64`, dashes and underscores alike) and in a TOML file
(`batch_size = 64`): `async-grpo run run.toml --learning-rate 1e-6`, `torchrun trainer_core.py --config run.toml`,
`worker_dispatcher.py --config run.toml`. The command line beats the file. One file may serve all programs: each reads its
own keys. Lists and tables are written out: `reward_fns = ["a", "b"]`, `reward_weights = {a = 2.0}`. The
`training_params.json` of a run is such a file, too: `async-grpo run runs/x/training_params.json --output-dir runs/y`.
"""


def config_class(program: str) -> Any:
    """The configuration that the program's options are made from."""
    module, _, name = PROGRAMS[program].partition(":")
    return getattr(import_module(module), name)


def foreign_keys() -> set[str]:
    """What a configuration file may hold for other programs than the one that reads it."""
    fields = [name for program in list(PROGRAMS)[:3] for name in config_class(program).__dataclass_fields__]
    return {*fields, *FACTS}


def page() -> str:
    """The whole page, as Markdown."""
    return HEAD + "".join(_section(program) for program in PROGRAMS)


def _section(program: str) -> str:
    local = program == "async-grpo run"  # whose options begin with those of the trainer
    told = config_class("async-grpo train, trainer_core.py").__dataclass_fields__ if local else {}
    lines = ["\nAll options of `async-grpo train`, and:\n"] if told else []
    panel = ""
    for field in fields_in_order(config_class(program)):
        if field.name in told:
            continue
        heading = EVERYDAY if field.metadata["everyday"] else field.metadata["panel"]
        if heading != panel:
            panel = heading
            lines.append(f"\n### {panel}\n\n| option | default | |\n|---|---|---|")
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default}`"
        shown = "" if field.default in (None, "") else default
        lines.append(f"| `--{dashed(field.name)}` | {shown} | {help_of(field).replace('|', chr(92) + '|')} |")
    return f"\n## {program}\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
