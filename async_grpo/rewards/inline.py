"""Shipped rewards that need no process: they cannot hang, so the queue computes them in its own process.

A function in `BOUNDED` reads each character a bounded number of times, computes with numbers of bounded length, keeps no
state and reads no file. Every other function runs in a process, whatever its name and its decorators.
"""

import time
from collections.abc import Mapping
from typing import Any

from async_grpo.rewards.builtin import countdown, environment, text
from async_grpo.rewards.isolation.child import Reward
from async_grpo.rewards.verifier_worker import fields_of
from async_grpo.types import AdapterResult

BOUNDED = (countdown.score, text.format, environment.environment)


class InlineReward:
    """A `VerifierWorker` whose `score` never waits. It reads answers as a reward's process does."""

    capacity = 1

    def __init__(self, name: str, adapter: Any, options: Mapping[str, Any]) -> None:
        self._name = name
        self._reward = Reward(adapter, options)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Return the result; FAILED for any exception of the reward. `timeout_s` is not needed."""
        started_at = time.monotonic()
        ((answer,),) = await self._reward.replies([{"sample": sample}])
        return AdapterResult(self._name, **fields_of(answer), latency_s=time.monotonic() - started_at)

    async def close(self) -> None:
        """Do nothing: nothing is open."""
