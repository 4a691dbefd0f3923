"""Shipped rewards that need no process: they cannot hang, so the queue computes them where it is.

What stands in `BOUNDED` looks at a character a bounded number of times, computes with numbers of a bounded number of
digits, keeps nothing, and reads no file. Any other function goes to a process, whatever its name and its marks.
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
    """A `VerifierWorker` whose `score` never waits, and answers in the form in which a process does."""

    capacity = 1

    def __init__(self, name: str, adapter: Any, options: Mapping[str, Any]) -> None:
        self._name, self._reward = name, Reward(adapter, options)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """The result; FAILED for what the reward raises. No time-out is needed."""
        started = time.monotonic()
        ((answer,),) = await self._reward.replies([{"sample": sample}])
        return AdapterResult(self._name, **fields_of(answer), latency_s=time.monotonic() - started)

    async def close(self) -> None:
        """Nothing is open."""
