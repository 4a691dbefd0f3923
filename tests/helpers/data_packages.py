"""Where the packages of the extra `data` are (`scripts/setup_extras`): apart, as JSONL needs none of them."""

import importlib.util
import os
import sys
from pathlib import Path

PACKAGES = Path(sys.prefix, "data")


def are_there() -> bool:
    """Whether they are installed; in CI they must be."""
    is_importable = importlib.util.find_spec("datasets") is not None
    return is_importable or (PACKAGES / "datasets").exists() or bool(os.environ.get("REQUIRE_EXTRAS"))
