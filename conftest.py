"""What the examples in the docstrings of `async_grpo/algorithm` take for granted."""

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _estimators(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    if request.path.parent.name == "algorithm":
        from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

        doctest_namespace["ADVANTAGE_ESTIMATORS"] = ADVANTAGE_ESTIMATORS
