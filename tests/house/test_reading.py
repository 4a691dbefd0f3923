"""The core can be read in an afternoon: docs/reading.md names its files, and they are few."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reading.md").read_text()
FILES = re.findall(r"^\| `([^`]+\.py)` \|", PAGE, re.MULTILINE)


def test_the_core_is_as_many_files_as_the_page_says_at_most_35_and_they_exist():
    told = re.search(r"^(\d+) files \(`tests/house/test_reading.py` counts them\)", PAGE, re.MULTILINE)
    assert told and len(FILES) == len(set(FILES)) == int(told[1]) <= 35
    assert [name for name in FILES if not (ROOT / name).is_file()] == []


def test_it_begins_with_grpo_in_one_file():
    assert FILES[0] == "examples/plain_grpo.py"
