"""The core can be read in an afternoon: docs/reading.md names its files, and they are as few lines as it says."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = re.findall(r"^\| `([^`]+\.py)` \|", (ROOT / "docs" / "reading.md").read_text(), re.MULTILINE)


def test_the_core_is_some_25_files_of_5000_lines_at_most():
    lines = {name: len((ROOT / name).read_text().splitlines()) for name in FILES}
    assert len(FILES) == len(set(FILES)) and 25 <= len(FILES) <= 35
    assert sum(lines.values()) <= 5000, sorted(lines.items(), key=lambda item: -item[1])


def test_it_begins_with_grpo_in_one_file():
    assert FILES[0] == "examples/plain_grpo.py"
