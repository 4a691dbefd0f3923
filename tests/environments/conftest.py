"""What the tests of environments share."""

import pytest

from async_grpo.environments import refusals


@pytest.fixture(autouse=True)
def answers_refused_requests_at_once(request, monkeypatch):
    """Delay no refused request, because many tests send dozens; `test_bounds` tests the delays."""
    if not request.module.__name__.endswith("test_bounds"):
        monkeypatch.setattr(refusals, "FIRST_DELAY_S", 0.0)
