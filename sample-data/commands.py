"""`async-grpo data ...`: make training data."""

import typer

from async_grpo.data import create_count_down, create_gsm8k

app = typer.Typer(
    help="Make training data.",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    pretty_exceptions_enable=False,
)
app.command("countdown")(create_count_down.main)
app.command("gsm8k")(create_gsm8k.main)
