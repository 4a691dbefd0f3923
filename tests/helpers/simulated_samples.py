"""What the samples of a `SimulatedRun` are: tokens and rewards that follow from a prompt's ordinal and the member alone."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from schedules import Schedule

from async_grpo.cluster.registered_workers import request_seed
from async_grpo.testing import FakeVerification
from async_grpo.types import RewardStatus, Verdict

RUN_SEED, MIN_VALID = 7, 2
Identity = tuple[int, int]  # ordinal and member


def tokens_of(seed: int, member: int) -> list[int]:
    """The completion of a request: as an engine's, it follows from the seed. The first token tells the member."""
    draw = random.Random(seed)
    return [1 + member, *(draw.randrange(10, 99) for _ in range(draw.choice((0, 1, 2, 5))))]


def completion_of(one: Identity) -> list[int]:
    return tokens_of(request_seed(RUN_SEED, *one), one[1])


class Verification(FakeVerification):
    """Rewards that depend on the sample alone; every fourth prompt's are all the same, every fifth has a failure."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(lambda sample: reward(sample["group_id"], sample["completion_token_ids"][0] - 1))
        self._draw = draw

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        await asyncio.sleep(self._draw.choice((0.0, 0.2, 2.0)) * self._draw.random())
        return await super().verify(sample, evaluation=evaluation)


def reward(ordinal: int, member: int) -> float | RewardStatus:
    if ordinal % 5 == 3 and member == 1:
        return RewardStatus.FAILED
    return 1.0 if ordinal % 4 == 2 else float(member)


def trained_members(schedule: Schedule, ordinal: int) -> list[int]:
    """Of the group of a prompt, if it is trained on."""
    found = [m for m in range(schedule.members) if not isinstance(reward(ordinal, m), RewardStatus)]
    return found if len(found) >= MIN_VALID else []


def check_trained(
    schedule: Schedule, trained: Sequence[set[Identity]], drawn: int, set_aside: set[int]
) -> None:
    """Of the prompts `drawn`, each is trained on once, in one step; but those that gave their place to another."""
    times = Counter(ordinal for step in trained for ordinal in {ordinal for ordinal, _ in step})
    assert set(times) <= set(range(drawn)) and set(times.values()) <= {1}, times
    for ordinal in range(drawn):
        members = trained_members(schedule, ordinal)
        gives_way = schedule.resample and len({reward(ordinal, member) for member in members}) < 2
        gives_way |= schedule.refill and RewardStatus.FAILED in map(
            reward, [ordinal] * schedule.members, range(9)
        )
        is_told = ordinal in set_aside or gives_way or not members
        assert times[ordinal] or is_told, f"the group of prompt {ordinal} was lost"
