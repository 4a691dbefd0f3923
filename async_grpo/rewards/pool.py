"""VerifierPool: every adapter scores every sample, each with its own queue and workers, and nothing is lost.

    pool = VerifierPool(["mathd", "sympy"], process_maker(source), workers=2)
    await pool.start()
    verdict = await pool.verify({"completion": ..., "answer": ..., ...})

The workers themselves are somebody else's: processes here (`process.process_maker`), actors elsewhere.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.combine import combine
from async_grpo.rewards.lane import Lane
from async_grpo.rewards.worker import MakeWorker, Patience, VerifierWorker
from async_grpo.types import Verdict

__all__ = ["VerifierPool", "VerifierWorker"]


class VerifierPool:
    """Scores samples with all adapters at once. Plain asyncio: use it from one event loop.

    Args:
        adapters: names, as `make_worker` understands them.
        make_worker: makes a started worker of one adapter, here or on another machine.
        workers: how many, for all adapters alike or by name (1 where none is given).
        timeout_s: for scoring one sample, from when a worker takes it; time in the queue is measured apart.
        grace_s: how much longer a worker may be silent before it is fenced, and the deadline for closing it.
        make_timeout_s, backoff_s: for making one worker, and before each attempt to make one.

    Raises:
        ConfigurationError: no adapter, one named twice, or an impossible number of workers.
    """

    def __init__(
        self,
        adapters: Sequence[str],
        make_worker: MakeWorker,
        *,
        workers: Mapping[str, int] | int = 1,
        timeout_s: float = 30.0,
        grace_s: float = 10.0,
        make_timeout_s: float = 120.0,
        backoff_s: Sequence[float] = (0.0, 1.0, 5.0),
    ) -> None:
        counts = _worker_counts(adapters, workers)
        patience = Patience(timeout_s, grace_s, make_timeout_s, tuple(backoff_s))
        self._lanes = {name: Lane(name, make_worker, count, patience) for name, count in counts.items()}

    async def start(self) -> None:
        """Make all workers; none is left behind if one cannot be made.

        Raises:
            ConfigurationError: the user's page cannot work.
            Exception: what the last attempt to make a worker raised.
        """
        try:
            starts = [lane.start() for lane in self._lanes.values()]
            outcomes = await asyncio.gather(*starts, return_exceptions=True)
            if errors := [outcome for outcome in outcomes if outcome is not None]:
                raise errors[0]
        except BaseException:
            await self.close()
            raise

    async def verify(self, sample: dict[str, Any]) -> Verdict:
        """The combined verdict (see `combine`). Never raises for an adapter's failure; may be cancelled."""
        return combine(await asyncio.gather(*(lane.score(sample) for lane in self._lanes.values())))

    async def close(self) -> None:
        """Cancel what runs, fail what waits, close every worker; bounded by a few `grace_s`."""
        await asyncio.gather(*(lane.close() for lane in self._lanes.values()))

    def stats(self) -> dict[str, dict[str, Any]]:
        """By adapter: counts and seconds since the last `take_stats`, and the queue and workers of now."""
        return {
            name: lane.stats.as_dict() | {"queue_depth": lane.queue_depth, "workers": lane.num_workers}
            for name, lane in self._lanes.items()
        }

    def take_stats(self) -> dict[str, dict[str, Any]]:
        """`stats`, and begin anew: for one line per step."""
        stats = self.stats()
        for lane in self._lanes.values():
            lane.stats.reset()
        return stats


def _worker_counts(adapters: Sequence[str], workers: Mapping[str, int] | int) -> dict[str, int]:
    if not adapters or len(set(adapters)) != len(adapters):
        raise ConfigurationError(f"a verifier pool needs adapters, each once, not {list(adapters)}")
    by_name = dict.fromkeys(adapters, workers) if isinstance(workers, int) else dict(workers)
    if unknown := sorted(set(by_name) - set(adapters)):
        raise ConfigurationError(
            f"workers asked for {', '.join(unknown)}, but the adapters are {list(adapters)}"
        )
    counts = {name: by_name.get(name, 1) for name in adapters}
    if min(counts.values()) < 1:
        raise ConfigurationError(f"every adapter needs at least one worker, not {counts}")
    return counts
