"""`docs/options.md`, made from the options themselves: `python scripts/options_page.py > docs/options.md`."""

import dataclasses

from async_grpo.launch.commands import COMMANDS, config_class
from async_grpo.options.fields import fields_in_order, help_of, panel_of, spellings_of

HEAD = """# Options

Made by `python scripts/options_page.py > docs/options.md`; a test holds it current.

Every option can stand on the command line (`--batch-size 64`, dashes and underscores alike) and in a TOML file
(`batch_size = 64`): `async-grpo run run.toml --learning-rate 1e-6`, `torchrun trainer_core.py --config run.toml`,
`worker_dispatcher.py --config run.toml`. The command line beats the file. One file may serve all programs: each reads its
own keys. Lists and tables are written out: `reward_fns = ["a", "b"]`, `reward_weights = {a = 2.0}`. The options of a file
stand one below the other, or in tables named for the rooms of the library that they belong to (`[training]`, and below it
`learning_rate = 1e-6`). The `training_params.json` of a run is such a file, too:
`async-grpo run runs/x/training_params.json --output-dir runs/y`.
"""


def page() -> str:
    """Return the whole page, as Markdown."""
    return HEAD + "".join(_section(name) for name, command in COMMANDS.items() if command.config)


def _section(program: str) -> str:
    known = {"run": "train", "doctor": "run", "replay": "train"}.get(program)  # whose options it has, too
    told = config_class(known).__dataclass_fields__ if known else {}
    lines = [f"\nAll options of `async-grpo {known}`, and:\n"] if told else []
    panel = ""
    for field in fields_in_order(config_class(program)):
        if field.name in told:
            continue
        if panel_of(field) != panel:
            panel = panel_of(field)
            lines.append(f"\n### {panel}\n\n| option | default | |\n|---|---|---|")
        default = "required" if field.default is dataclasses.MISSING else f"`{field.default}`"
        shown = "" if field.default in (None, "") else default
        names = [field.name.upper()] if field.metadata["argument"] else spellings_of(field)
        # A flag is --name/--no-name
        names = [spelling.partition("/")[0] for spelling in names]
        name = ", ".join(f"`{spelling}`" for spelling in names)
        lines.append(f"| {name} | {shown} | {help_of(field).replace('|', chr(92) + '|')} |")
    return f"\n## async-grpo {program}\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
