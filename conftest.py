"""What all tests take for granted, also when `pytest` is called by hand."""

import os
from typing import Any

import pytest

# As in `scripts/test`, before torch is imported: sums of several threads round differently, and no test may ask a hub
for name, value in {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}.items():
    os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def _estimators(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """For the examples in the docstrings of `async_grpo/algorithm`."""
    if request.path.parent.name == "algorithm":
        from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

        doctest_namespace["ADVANTAGE_ESTIMATORS"] = ADVANTAGE_ESTIMATORS
