"""Print `docs/options.md`, made from the options themselves: `python scripts/options_page.py > docs/options.md`."""

import dataclasses

from async_grpo.launch.commands import COMMANDS, config_class
from async_grpo.options.fields import fields_in_order, help_of, panel_of, spellings_of

HEAD = """# Options

`python scripts/options_page.py > docs/options.md` makes this page, and a test checks that it is up to date.

You can give every option on the command line (`--batch-size 64`, with dashes or underscores) or in a TOML file
(`batch_size = 64`): `async-grpo run run.toml --learning-rate 1e-6`, `torchrun trainer_core.py --config run.toml`,
`worker_dispatcher.py --config run.toml`. The command line overrides the file. One file may be used for all programs,
because each program reads only its own options. In a file, write lists and tables as TOML: `reward_fns = ["a", "b"]`,
`reward_weights = {a = 2.0}`. Write names of files with a comma or an equals sign in the same way:
`eval_data_path = {easy = "lr=1,a.jsonl"}`. Options may be at the top of the file, or in tables named after the packages of
the library that define them (`[training]`, and below it `learning_rate = 1e-6`). The `training_params.json` of a run is
such a file, too: `async-grpo run runs/x/training_params.json --output-dir runs/y`.
"""


def page() -> str:
    """Return the whole page, as Markdown."""
    return HEAD + "".join(_section(name) for name, command in COMMANDS.items() if command.config)


# Commands that have all options of another command. The page lists these options only under that other command
BASE_COMMANDS = {"run": "train", "doctor": "run", "replay": "train"}


def _section(command: str) -> str:
    lines = []
    base_fields = {}
    if command in BASE_COMMANDS:
        base_command = BASE_COMMANDS[command]
        base_fields = config_class(base_command).__dataclass_fields__
        lines.append(f"\nAll options of `async-grpo {base_command}`, and:\n")
    panel = ""
    for field in fields_in_order(config_class(command)):
        if field.name in base_fields:
            continue
        if panel_of(field) != panel:
            panel = panel_of(field)
            lines.append(f"\n### {panel}\n\n| option | default | |\n|---|---|---|")
        lines.append(_row(field))
    return f"\n## async-grpo {command}\n" + "\n".join(lines) + "\n"


def _row(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        default = "required"
    elif field.default in (None, ""):
        default = ""
    else:
        default = f"`{field.default}`"
    names = [field.name.upper()]
    if not field.metadata["argument"]:
        # A flag is spelled --name/--no-name. Show only the first part
        names = [spelling.partition("/")[0] for spelling in spellings_of(field)]
    name = ", ".join(f"`{name}`" for name in names)
    help_text = help_of(field).replace("|", "\\|")
    return f"| {name} | {default} | {help_text} |"


if __name__ == "__main__":
    print(page(), end="")
