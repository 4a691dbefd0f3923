"""Which places of an engine's weights can be read back, and which of them are not in use."""

import pytest

from async_grpo.inference.read_back_places import ReadBack

FIRST, SECOND = "model.layers.0.mlp", "model.layers.1.mlp"
UP_OF_FIRST, UP_OF_SECOND = (f"{place}.up_proj.weight" for place in (FIRST, SECOND))


def compare(read_back: ReadBack, used: dict[str, int], arrived: dict[str, int]) -> None:
    read_back.compare([(used, arrived)])


def test_a_layer_that_arrives_in_a_later_update_than_another_is_read_back_from_then_on():
    """Layers that do not fit into memory at once arrive in several rounds, and those of later rounds can be read, too."""
    read_back = ReadBack()
    compare(read_back, used={FIRST: 3, SECOND: 5}, arrived={FIRST: 3})
    assert read_back.is_readable(UP_OF_FIRST) and not read_back.is_readable(UP_OF_SECOND)
    compare(read_back, used={FIRST: 3, SECOND: 6}, arrived={FIRST: 3, SECOND: 6})
    assert read_back.is_readable(UP_OF_FIRST) and read_back.is_readable(UP_OF_SECOND)
    compare(read_back, used={FIRST: 3, SECOND: 6}, arrived={FIRST: 3, SECOND: 7})
    assert read_back.is_in_use(UP_OF_FIRST) and not read_back.is_in_use(UP_OF_SECOND)


def test_a_layer_that_differs_when_it_arrives_for_the_first_time_cannot_be_read_in_whichever_update_that_is():
    read_back = ReadBack()
    compare(read_back, used={FIRST: 3, SECOND: 5}, arrived={FIRST: 3})
    compare(read_back, used={FIRST: 3, SECOND: 5}, arrived={FIRST: 3, SECOND: 8})
    assert not read_back.is_readable(UP_OF_SECOND) and read_back.is_in_use(UP_OF_SECOND)
    assert read_back.is_readable(UP_OF_FIRST)


@pytest.mark.parametrize("at_start", [None, 5])
def test_received_zeros_are_something_that_was_received(at_start):
    """A sum of hashes is 0 if all values are zero, as those of a new bias or of a norm that adds 1."""
    read_back = ReadBack()
    if at_start is not None:
        read_back.begin([({FIRST: at_start}, {})])
        compare(read_back, used={FIRST: at_start}, arrived={FIRST: at_start})
    else:
        compare(read_back, used={FIRST: 0}, arrived={FIRST: 0})
    assert read_back.is_readable(UP_OF_FIRST)
    compare(read_back, used={FIRST: 5}, arrived={FIRST: 0})
    assert not read_back.is_in_use(UP_OF_FIRST)
    compare(read_back, used={FIRST: 0}, arrived={FIRST: 0})
    assert read_back.is_in_use(UP_OF_FIRST)


def test_the_log_says_how_many_places_no_update_has_brought(caplog):
    caplog.set_level("INFO")
    read_back = ReadBack()
    compare(read_back, used={FIRST: 3, SECOND: 5}, arrived={FIRST: 3})
    compare(read_back, used={FIRST: 4, SECOND: 5}, arrived={FIRST: 4})
    assert caplog.messages == [
        "1 of 1 places that have received weights can be read back; 1 places have received none"
    ]
