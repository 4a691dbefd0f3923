"""A computation has the time that it is given; with no time left it does not begin."""

import time

import pytest

from async_grpo.processes.deadline import interrupted_after


@pytest.mark.parametrize("seconds", [0, 0.0, -1.5])
def test_a_block_with_no_time_left_does_not_begin(seconds):
    has_begun = False
    is_refused = pytest.raises(TimeoutError, match="the template has no time left")
    with is_refused, interrupted_after(seconds, "the template"):
        has_begun = True
    assert not has_begun


def test_a_block_that_does_not_end_is_interrupted():
    is_refused = pytest.raises(TimeoutError, match="the template takes more than 0.05 s")
    with is_refused, interrupted_after(0.05, "the template"):
        time.sleep(60)
