"""docs/agents.md shows the examples as they are, and names every framework that has pins."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "agents.md"
EXAMPLES = ROOT / "examples" / "agents"
FRAMEWORKS = tomllib.loads((EXAMPLES / "frameworks.toml").read_text())
MOST_LINES = 36


def test_the_page_shows_the_examples_as_they_are():
    command = [sys.executable, ROOT / "scripts" / "agents_page.py"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert made == PAGE.read_text(), "python scripts/agents_page.py --write"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_pins_an_example_and_a_line_of_the_table(name):
    pins = FRAMEWORKS[name].get("packages") or FRAMEWORKS[name]["npm"]
    (example,) = EXAMPLES.glob(f"{name.replace('-', '_')}_agent.*")
    code = example.read_text()
    assert code in PAGE.read_text() and len(code.splitlines()) <= MOST_LINES
    assert f"| {name} | {', '.join(pins)} |" in PAGE.read_text(), (
        "python -m tests.long.agent_frameworks --write"
    )
    if "packages" in FRAMEWORKS[name]:
        constraints = (EXAMPLES / "constraints" / f"{name}.txt").read_text().splitlines()
        for pin in pins:
            package, version = pin.split("==")
            assert f"{package.partition('[')[0]}=={version}" in constraints
