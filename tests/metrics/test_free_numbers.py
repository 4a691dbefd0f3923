"""Numbers that agents, environments and rewards name as they like become metrics only within bounds."""

import logging

import pytest

from async_grpo.metrics.free_numbers import MAX_NUMBER_NAMES, FreeNumbers


@pytest.mark.parametrize("name", ["a", "a" * 100, "tool_calls", "a/b.c-d", "größe"])
def test_a_plain_name_is_kept(name):
    assert FreeNumbers().bounded("environment", {name: 1.0}) == {name: 1.0}


@pytest.mark.parametrize("name", ["", "a" * 101, "a b", "a\n", "\x1b[2J", "a{b}", "a\ud800"])
def test_another_name_is_dropped_with_one_warning_that_can_be_printed(name, caplog):
    numbers = FreeNumbers()
    for _ in range(3):
        assert numbers.bounded("environment", {name: 1.0, "b": 2.0}) == {"b": 2.0}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().isascii() and record.getMessage().isprintable()


@pytest.mark.parametrize(
    ("value", "is_kept"), [(1e38, True), (-1e38, True), (1.1e38, False), (-1e308, False)]
)
def test_a_number_whose_square_fits_no_float_is_dropped(value, is_kept):
    assert bool(FreeNumbers().bounded("environment", {"a": value})) == is_kept


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_dropped(value):
    assert FreeNumbers().bounded("environment", {"a": value}) == {}


def test_names_that_change_with_each_sample_fill_no_memory_and_leave_room_for_other_sources(caplog):
    numbers, kept_names = FreeNumbers(), set()
    for sample in range(100):
        kept_names |= set(numbers.bounded("environment", {f"name_{sample}_{n}": 1.0 for n in range(100)}))
    assert len(kept_names) == MAX_NUMBER_NAMES and len(caplog.records) == 1
    assert numbers.bounded("environment", {"name_0_0": 2.0}) == {"name_0_0": 2.0}  # a known name goes on
    assert numbers.bounded("math", {"length": 3.0}) == {"length": 3.0}
