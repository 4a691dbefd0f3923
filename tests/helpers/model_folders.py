"""Changes to a copy of the tiny model's folder, and the checks of a model before a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_grpo.modeling.load import load_tokenizer, stop_token_ids
from async_grpo.modeling.wrong_models import refuse_wrong_model

Change = Callable[[Path], Any]


def check(folder: Path) -> None:
    """All checks that a run makes of its model before anything is started."""
    refuse_wrong_model(folder, trains=True)
    load_tokenizer(folder)
    stop_token_ids(folder)


def edited(name: str, **values: Any) -> Change:
    """Change values of a JSON file; `...` removes a value."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | values
        content = {key: value for key, value in content.items() if value is not ...}
        (folder / name).write_text(json.dumps(content))

    return change
