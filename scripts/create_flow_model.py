"""Train the small model that draws digits in two inks, or the network that reads drawn digits (the reader).

python scripts/create_flow_model.py                          # the model, once per machine, into the user's cache
python scripts/create_flow_model.py --output digits-model    # the model, into a folder
python scripts/create_flow_model.py --reader sample-data/digit-reader.npz    # the reader
"""

import logging
from pathlib import Path
from typing import Annotated

import typer

from async_grpo.data import digits, digits_model


def main(
    output: Annotated[
        Path | None, typer.Option(help="Folder of the model. By default in the user's cache.")
    ] = None,
    reader: Annotated[Path | None, typer.Option(help="Make the reader instead, in this file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the training.")] = 0,
) -> None:
    """Train the drawing model, or the reader."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if reader is not None:
        accuracy = digits.train_reader(reader, seed=seed)
        print(f"{reader}: reads {accuracy:.1%} of held-out digits")
        return
    if output is None:
        print(digits_model.cached_digits_model())
        return
    loss = digits_model.make_digits_model(output, seed=seed)
    print(f"{output}: loss {loss:.3f}")


if __name__ == "__main__":
    typer.run(main)
