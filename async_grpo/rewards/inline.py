"""Shipped rewards that need no worker process. They cannot hang, so the process of the queue computes them itself.

Each function in `BOUNDED` reads every character a bounded number of times, computes with numbers of bounded length,
keeps no state and reads no file. All other functions run in worker processes.
"""

import time
from collections.abc import Mapping
from typing import Any

from async_grpo.rewards.builtin import countdown, environment, text, unscored
from async_grpo.rewards.isolation.child import Reward
from async_grpo.rewards.verifier_worker import fields_of
from async_grpo.types import AdapterResult

BOUNDED = (countdown.score, text.format, environment.environment, unscored.unscored)


class InlineReward:
    """A `VerifierWorker` that computes the reward in this process, without waiting for anything."""

    capacity = 1

    def __init__(self, name: str, adapter: Any, options: Mapping[str, Any]) -> None:
        self._name = name
        self._reward = Reward(adapter, options)

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """Return the result, which is FAILED if the reward raises any exception. `timeout_s` is ignored."""
        started_at = time.monotonic()
        ((answer,),) = await self._reward.replies([{"sample": sample}])
        return AdapterResult(self._name, **fields_of(answer), latency_s=time.monotonic() - started_at)

    async def close(self) -> None:
        """Do nothing, because this worker has no resources."""
