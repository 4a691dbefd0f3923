"""Tests that take from half a minute to hours: each is a program with options, and `scripts/test` runs none of them.

    python -m tests.long.fuzz_judges --help

Each prints what it saw, and what it takes to see it again (a seed, a victim, a moment). Shorter tests of the same things
are in the other folders; some of them run a little of a program from here.
"""

import sys
from pathlib import Path

# The programs share modules with the tests, which pytest finds by the setting `pythonpath` of pyproject.toml
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
