"""Test modules stand alone, and the seconds of slow tests are recorded."""

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEST_MODULES = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
# Read from the text, so that an import in a program that a test writes to a file is found, too
IMPORT = re.compile(r"^\s*(?:from\s+([\w.]+)\s+)?import\s(.*)", re.MULTILINE)


def modules_imported_by(text: str) -> set[str]:
    names = set()
    for module, imported in IMPORT.findall(text):
        names |= set(re.split(r"\W+", module)) | set(re.split(r"\W+", imported))
    return names & TEST_MODULES


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("from test_played import run", True),
        ("    import os, test_played", True),
        ("from tests.environments.test_played import run", True),
        ("from tests.environments import test_played", True),
        ("from test_played import (", True),
        ("from tests.helpers.answers import answer_of", False),
        ("from aiohttp import test_utils", False),
        ("# from the test_played module", False),
    ],
)
def test_an_import_of_a_test_module_is_known_by_its_text(line, is_refused):
    assert modules_imported_by(f"import os\n{line}\n") == ({"test_played"} if is_refused else set())


def test_no_file_imports_a_test_module():
    """Otherwise a change of one test breaks others, and its fixtures and parameters are collected twice."""
    importing = {}
    for folder in ("tests", "benchmarks", "scripts", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            modules = modules_imported_by(path.read_text())
            if modules and path != Path(__file__).resolve():
                importing[str(path.relative_to(ROOT))] = modules
    assert not importing, f"move what is shared into a module of tests/helpers: {importing}"


def test_no_two_test_modules_have_the_same_name():
    """A folder of tests is no package, so pytest would refuse the second module when both run together."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    repeated = [name for name, count in names.items() if count > 1]
    assert not repeated, f"rename one of each: {repeated}"


def test_recorded_are_functions_whose_cases_take_a_second_together_and_those_not_run_keep_theirs(
    pytestconfig, tmp_path, monkeypatch
):
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "conftest.py"))
    recorded = tmp_path / "durations.json"
    monkeypatch.setattr(conftest, "DURATIONS_FILE", recorded)
    here = "tests/house/test_tests.py::"
    earlier = {
        here + "not_run": 9.0,
        here + "faster_now": 9.0,
        "tests/test_of_a_file_that_is_gone.py::a": 9.0,
    }
    recorded.write_text(json.dumps(earlier))
    recorder = conftest.DurationRecorder()
    # Pytest reports the setup, the call and the teardown of each case
    for name, duration in [("cases[1]", 0.3), ("cases[2]", 0.3), ("cases[2]", 0.5), ("faster_now", 0.9)]:
        recorder.pytest_runtest_logreport(SimpleNamespace(nodeid=here + name, duration=duration))
    recorder.pytest_sessionfinish()
    assert json.loads(recorded.read_text()) == {here + "cases": 1.1, here + "not_run": 9.0}
