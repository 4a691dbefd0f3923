"""The helper that shows by an eighth of a text that the whole is read in time."""

import time

import pytest
from reading_time import TooSlow, check_reading_time


def spend(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        # The limit counts no time in the kernel, where the clock is read
        sum(range(2_000))


def text_of(count: int) -> str:
    return "a" * count


def test_linear_time_on_a_slow_machine_passes_and_quadratic_time_fails():
    check_reading_time(lambda text: spend(0.002 * len(text)), text_of, 80, limit_s=0.1)
    with pytest.raises(TooSlow):
        check_reading_time(lambda text: spend(0.0001 * len(text) ** 2), text_of, 80, limit_s=0.1)


def test_a_slow_first_reading_hides_no_growth():
    readings = []

    def read(text: str) -> None:
        spend(0.0001 * len(text) ** 2 if readings else 0.09)
        readings.append(text)

    with pytest.raises(TooSlow):
        check_reading_time(read, text_of, 80, limit_s=0.1)


def test_linear_time_far_beyond_the_limit_fails():
    with pytest.raises(TooSlow):
        check_reading_time(lambda text: spend(0.009 * len(text)), text_of, 80, limit_s=0.1)
