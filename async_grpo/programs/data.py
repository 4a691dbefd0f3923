"""`async-grpo data countdown|gsm8k`: prompts for a tokenizer, by the scripts in `sample-data`."""

import sys
from collections.abc import Sequence

import typer

from async_grpo.data import create_count_down, create_gsm8k

app = typer.Typer(help="Make training data.", add_completion=False, no_args_is_help=True)
app.command("countdown")(create_count_down.main)
app.command("gsm8k")(create_gsm8k.main)


def main(argv: Sequence[str] | None = None, program: str | None = None) -> None:
    """Run the command line `argv` (default: the program's own), and exit; `program`: what the help calls it."""
    app(args=list(sys.argv[1:] if argv is None else argv), prog_name=program)


if __name__ == "__main__":
    main()
