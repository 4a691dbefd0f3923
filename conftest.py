"""What all tests take for granted, also when `pytest` is called by hand; and the tiers of `scripts/test`."""

import gc
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: sums of several threads round differently, no test may ask a hub, and at Ray's own niceness
# of 15 its actors do not get to answer within a minute on cores that others want
NEEDED = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_worker_niceness": "0",
}
for name, value in NEEDED.items():
    os.environ.setdefault(name, value)

# Test functions (file::function) and the seconds that all their cases took together, for those that took SLOW_S or longer.
# `scripts/test --all --record-durations` writes it
DURATIONS_FILE = Path(__file__).parent / "tests" / "durations.json"
SLOW_S = 1.0
# Tier -> the marks of the tests that it leaves out. pyproject.toml describes the marks, and CONTRIBUTING.md the tiers
TIERS = {"fast": ("exhaustive", "real", "slow"), "usual": ("exhaustive",), "all": ()}
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=list(TIERS), default="all", help="which tests are left out: scripts/test says it"
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help=f"write the seconds of the tests that were run into {DURATIONS_FILE.name}",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder(), "record-durations")
    # Imports and tests that are collected stay. The garbage collector would visit all of them again and again
    gc.disable()


def function_of(nodeid: str) -> str:
    """Return the name of a test without that of its case: what `DURATIONS_FILE` is keyed by.

    >>> function_of("tests/a/test_b.py::test_c[3::d]")
    'tests/a/test_b.py::test_c'
    """
    return nodeid.partition("[")[0]


class DurationRecorder:
    """Adds up the seconds of each test function, and writes them at the end."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        # A test that was not run keeps its earlier seconds, unless its file is gone
        earlier = json.loads(DURATIONS_FILE.read_text())
        seconds = {name: value for name, value in earlier.items() if Path(name.partition("::")[0]).exists()}
        for name, value in self._seconds.items():
            seconds[name] = round(value, 1)
        slow = {name: value for name, value in sorted(seconds.items()) if value >= SLOW_S}
        DURATIONS_FILE.write_text(json.dumps(slow, indent=0) + "\n")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that do not belong to the tier, and count them by the first of its marks that they have."""
    marks = TIERS[config.getoption("--tier")]
    slow = json.loads(DURATIONS_FILE.read_text())
    for item in items:
        if function_of(item.nodeid) in slow:
            item.add_marker("slow")
    mark_by_item = {
        item: next((mark for mark in marks if item.get_closest_marker(mark)), None) for item in items
    }
    config.stash[LEFT_OUT] = dict(Counter(mark for mark in mark_by_item.values() if mark is not None))
    if hasattr(
        config, "workeroutput"
    ):  # a process of pytest-xdist, whose terminal is that of another process
        config.workeroutput["left_out"] = config.stash[LEFT_OUT]
    config.hook.pytest_deselected(items=[item for item, mark in mark_by_item.items() if mark is not None])
    items[:] = [item for item, mark in mark_by_item.items() if mark is None]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the counts of a process of pytest-xdist; each of them has collected all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    tier, left_out = config.getoption("--tier"), config.stash[LEFT_OUT]
    if tier == "all":
        return
    counts = ", ".join(f"{left_out.get(mark, 0)} {mark}" for mark in TIERS[tier])
    terminalreporter.write_line(f"Tier {tier}: left out were {counts} tests; scripts/test --all runs all")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """With --doctest-modules, leave out files without examples: pytest would import each of them, and vLLM for some."""
    is_module = collection_path.suffix == ".py" and not collection_path.name.startswith(("test_", "conftest"))
    return True if is_module and ">>>" not in collection_path.read_text(encoding="utf-8") else None


@pytest.fixture(autouse=True)
def _estimators(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """For the examples in the docstrings of `async_grpo/algorithm`."""
    if request.path.parent.name == "algorithm":
        from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

        doctest_namespace["ADVANTAGE_ESTIMATORS"] = ADVANTAGE_ESTIMATORS
