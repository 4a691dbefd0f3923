"""A little of the fuzzing of `tests.long.loop_fuzz`, and proof that it would notice."""

import asyncio
import json

import pytest

from tests.long import loop_fuzz
from tests.long.loop_fuzz import KINDS, MeteredLoop, attack, begin_to_measure

LIMIT_S = 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_holds_up_the_event_loop(kind):
    found = attack(count=4, seed=11, max_bytes=300_000, kinds=[kind])
    assert len(found[kind]) == 4 and max(found[kind])[0] < LIMIT_S


def test_the_longest_turn_is_found():
    async def story() -> None:
        await begin_to_measure()
        await asyncio.sleep(0)
        json.loads("[" + "[]," * 600_000 + "1]")
        sum(range(10_000_000))
        await asyncio.sleep(0.01)

    loop = MeteredLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(story())
    assert 0.05 < loop.longest_s <= loop.longest_wall_s


def test_making_an_input_and_waiting_do_not_count():
    async def story() -> None:
        sum(range(10_000_000))
        await begin_to_measure()
        await asyncio.sleep(0.3)

    loop = MeteredLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(story())
    assert loop.longest_s < 0.05


def test_every_kind_of_input_is_among_a_thousand():
    assert sum(weight for weight, _ in KINDS.values()) == 1000 and loop_fuzz.MAX_BYTES == 4 * 2**20
