"""What all tests take for granted, also when `pytest` is called by hand."""

import os
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
