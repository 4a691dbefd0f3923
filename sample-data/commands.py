"""`async-grpo data ...`: make training data, and a small real model to train."""

import typer

from async_grpo.data import create_capitals, create_count_down, create_gsm8k, create_model

app = typer.Typer(
    help="Make training data, or a small real model.",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    pretty_exceptions_enable=False,
)
app.command("countdown")(create_count_down.main)
app.command("gsm8k")(create_gsm8k.main)
app.command("capitals")(create_capitals.main)
app.command("model")(create_model.main)
