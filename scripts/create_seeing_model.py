"""Train the small model that counts shapes, and draw its pictures.

python scripts/create_seeing_model.py                      # once per machine, into the user's cache
python scripts/create_seeing_model.py --output shapes      # into a folder
"""

import logging
from pathlib import Path
from typing import Annotated

import typer

from async_grpo.data import shapes


def main(
    output: Annotated[
        Path | None, typer.Option(help="Folder of model and data. By default in the user's cache.")
    ] = None,
    max_steps: Annotated[
        int, typer.Option(help="Maximum number of training steps; 0 writes a random model.")
    ] = shapes.MAX_TRAINING_STEPS,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the pictures.")] = 0,
) -> None:
    """Train the model, and write it with its data."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if output is None:
        print(shapes.cached_shapes())
        return
    shapes.make_shapes(output, max_steps=max_steps, seed=seed)
    print(output)


if __name__ == "__main__":
    typer.run(main)
