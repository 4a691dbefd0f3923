"""What is shipped with the package: a tiny model, countdown tasks and the default reward registry.

`async_grpo/data` is a link to the folder `sample-data` of the checkout, so that there is one copy of everything.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
TINY_MODEL = FOLDER / "tiny-model"
COUNTDOWN_TRAIN = FOLDER / "countdown_train.jsonl"
COUNTDOWN_HELDOUT = FOLDER / "countdown_heldout.jsonl"
GUESS_MODEL = FOLDER / "guess-model"
GUESS_TRAIN = FOLDER / "guess_train.jsonl"
GUESS_HELDOUT = FOLDER / "guess_heldout.jsonl"
