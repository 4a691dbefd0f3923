"""The core can be read in an afternoon: docs/reading.md names its files, and they are few."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = re.findall(r"^\| `([^`]+\.py)` \|", (ROOT / "docs" / "reading.md").read_text(), re.MULTILINE)


def test_the_core_is_25_to_35_files_which_exist():
    assert len(FILES) == len(set(FILES)) and 25 <= len(FILES) <= 35
    assert [name for name in FILES if not (ROOT / name).is_file()] == []


def test_it_begins_with_grpo_in_one_file():
    assert FILES[0] == "examples/plain_grpo.py"
