"""The run's controller and all that it holds, through random schedules: see `SimulatedRun` for what must hold."""

import asyncio
import time

import pytest
import virtual_time
from schedules import Event, Schedule, drawn, shortest
from simulated_run import run_through

# python -m tests.long.schedules runs ten thousand, and makes one that fails shorter
HUNDREDS = [0, *(pytest.param(hundred, marks=pytest.mark.exhaustive) for hundred in (1, 2, 3, 4))]


@pytest.mark.parametrize("hundred", HUNDREDS)
def test_whatever_happens_every_group_is_trained_once_within_the_bound_and_nothing_is_left(hundred):
    for seed in range(100 * hundred, 100 * hundred + 100):
        try:
            run_through(drawn(seed))
        except Exception as error:
            error.add_note(f"by {drawn(seed)}")
            raise


def test_a_worker_that_registers_again_under_its_name_outlives_the_loss_of_its_old_link():
    """Whatever was asked through that link fails, and fences nobody."""
    again = tuple(Event(at, "again", passes=passes) for at, passes in ((3.0, 0), (5.0, 1), (9.0, 3)))
    assert run_through(Schedule(1, workers=1, events=again))["again"] == 3


def test_an_hour_passes_in_no_time_and_a_deadlock_is_found_at_once():
    async def waits(event: asyncio.Event | None) -> float:
        begun = time.monotonic()
        await (event.wait() if event else asyncio.sleep(3600))
        return time.monotonic() - begun

    assert virtual_time.run(waits(None), 4000) == 3600
    with pytest.raises(TimeoutError):
        virtual_time.run(waits(None), 3000)
    with pytest.raises(virtual_time.Stuck, match="nothing is left to run"):
        virtual_time.run(asyncio.wait_for(waits(asyncio.Event()), None), None)


def test_a_schedule_is_told_by_its_seed_and_made_as_short_as_what_fails():
    seed = next(s for s in range(100) if sum(event.what == "die" for event in drawn(s).events) > 1)
    found = shortest(drawn(seed), lambda schedule: any(event.what == "die" for event in schedule.events))
    assert [event.what for event in found.events] == ["die"] and drawn(seed) == drawn(seed)
    assert found == Schedule(**{**vars(Schedule(seed)), **{n: vars(found)[n] for n in KEPT}})
    assert eval(repr(found)) == found


KEPT = ("groups", "members", "staleness", "workers", "places", "events")
