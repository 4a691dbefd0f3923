"""Data that are shipped with the package: tiny models, tasks and the default reward registry.

`async_grpo/data` is a symbolic link to the folder `sample-data` of the repository, so that every file exists only once.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
TINY_MODEL = FOLDER / "tiny-model"
COUNTDOWN_TRAIN = FOLDER / "countdown_train.jsonl"
COUNTDOWN_HELDOUT = FOLDER / "countdown_heldout.jsonl"
CAPITALS_TRAIN = FOLDER / "capitals_train.jsonl"
CAPITALS_HELDOUT = FOLDER / "capitals_heldout.jsonl"
DIGITS_TRAIN = FOLDER / "digits_train.jsonl"
DIGITS_HELDOUT = FOLDER / "digits_heldout.jsonl"
DIGIT_REWARDS = FOLDER / "digit_rewards.py"
GUESS_MODEL = FOLDER / "guess-model"
GUESS_TRAIN = FOLDER / "guess_train.jsonl"
GUESS_HELDOUT = FOLDER / "guess_heldout.jsonl"
