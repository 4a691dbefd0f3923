"""What a program says of a trajectory's turns, in time, stays with these turns however their sequences are laid out."""

import asyncio
import random

import numpy as np
from chat_templates import Talkative, chat_of

from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.types import Prompt

REWARDS = {"one": 10.0, "two": 20.0, "three": 30.0}
STATES = {"one": "first", "two": "second", "three": "third"}


async def two_conversations():
    """Turns one and three of one conversation, and turn two, of another, between them."""
    chat = chat_of("appends")
    generation = Talkative(chat, random.Random(0))
    generation._dice.random = lambda: 0.5  # nothing is cut
    limits = TrajectoryLimits(9, 999, None, 60)
    policy = TrajectoryClient(
        generation, TrajectoryRecorder(chat), Prompt(0, np.empty(0, np.int32), {}), 0, limits
    )

    async def says(answer, messages):
        generation._says = lambda: answer
        return (await policy.complete(messages)).message

    first = [{"role": "user", "content": "a"}]
    reply = await says("one", first)
    await says("two", [{"role": "user", "content": "b"}])
    await says("three", [*first, reply, {"role": "user", "content": "c"}])
    return policy.trajectory(1.0, turn_rewards=[*REWARDS.values()], states=[*STATES.values()])


def test_rewards_and_states_go_with_their_turns():
    completion = asyncio.run(two_conversations())
    texts = [turn.text.partition("<")[0] for turn in completion.turns]
    assert sorted(texts) == sorted(REWARDS) and texts != [*REWARDS]  # laid out otherwise than in time
    assert dict(zip(texts, completion.outcome.turn_rewards, strict=True)) == REWARDS
    assert dict(zip(texts, completion.outcome.states, strict=True)) == STATES
