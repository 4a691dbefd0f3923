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
REGISTRY_FILE = "reward_registry.py"


def registry_file(given: str | Path | None = None) -> Path:
    """The registry file of a command: the one given, or `reward_registry.py` of the working folder, or the shipped one.

    >>> registry_file("rewards/mine.py")
    PosixPath('rewards/mine.py')
    """
    if given:
        return Path(given)
    here = Path(REGISTRY_FILE)
    return here if here.is_file() else FOLDER / REGISTRY_FILE
