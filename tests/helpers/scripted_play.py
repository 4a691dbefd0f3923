"""Trajectories of a policy whose words are scripted: prompts, settings, and a way to play them to their end."""

import asyncio
import random

import numpy as np
from chat_templates import Talkative, chat_of

from async_grpo.algorithm.config import AlgorithmConfig  # noqa: F401 - the estimators
from async_grpo.environments.played import Played
from async_grpo.messages import SharedRunSettings
from async_grpo.types import Prompt

SETTINGS = SharedRunSettings("r", "", 300, "float32", 1.0, (2,), 4000, 4000, "object_store", (), 0)


class OneSession(Talkative):
    """A policy that says what a test wants, and counts the turns of each trajectory on their own."""

    def __init__(self, says=None) -> None:
        super().__init__(chat_of("appends"), random.Random(0))
        self._dice.random = lambda: 0.5
        if says is not None:
            self._says = says

    async def take_stats(self):
        return {}


def prompt_of(**row) -> Prompt:
    """Return a prompt whose row has these columns."""
    return Prompt(4, np.array([5, 6], np.int32), {"input": "ab", **row})


async def trajectories(playing: Played, *prompts: Prompt, count: int = 1):
    """Play `count` trajectories of each prompt, and return them once all have ended."""

    async def of(prompt):
        return [one async for one in playing.generate(prompt, count)]

    await playing.start()
    try:
        return [one for several in await asyncio.gather(*map(of, prompts)) for one in several]
    finally:
        await playing.close()


def run(coroutine):
    """Run a coroutine to its end, within a minute."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))
