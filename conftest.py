"""What all tests take for granted, also when `pytest` is called by hand; and the tiers of `scripts/test`."""

import gc
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

# Tier -> the marks of the tests that it leaves out. pyproject.toml describes the marks, and CONTRIBUTING.md the tiers
TIERS = {"fast": ("exhaustive", "real", "slow"), "usual": ("exhaustive",), "all": ()}
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=list(TIERS), default="all", help="which tests are left out: scripts/test says it"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}
    # Imports and tests that are collected stay. The garbage collector would visit all of them again and again
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that do not belong to the tier, and count them by the first of its marks that they have."""
    marks = TIERS[config.getoption("--tier")]
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
