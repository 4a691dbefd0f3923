"""`StepClock`: the seconds of a step, by what they went into."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from async_grpo.metrics.spans import Span
from async_grpo.processes.waits import waiting
from async_grpo.training.distributed import Ranks

DURING_STEP = ("waiting_for_experience", "computing", "publishing_weights")
AFTER_STEP = ("evaluating", "checkpointing")  # not part of `time_per_batch`; not every rank has a part in it
KINDS = dict(zip((*DURING_STEP, *AFTER_STEP), ("wait", "train", "sync", "evaluate", "save"), strict=True))


class StepClock:
    """Where the seconds of a step go on this rank, by cause; its intervals are in Unix time, as other processes' are."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._started, self._time_per_batch = ranks, time.perf_counter(), 0.0
        self._seconds = dict.fromkeys((*DURING_STEP, *AFTER_STEP), 0.0)
        self._spans: list[Span] = []

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        """Add the time of the `with` block, the device's work in it included, to `cause`."""
        wall, start = time.time(), time.perf_counter()
        with waiting("rank", f"rank {self._ranks.rank}", cause):
            yield
            self._ranks.synchronize()
        elapsed = time.perf_counter() - start
        self._seconds[cause] += elapsed
        self._spans.append((f"trainer {self._ranks.rank}", KINDS[cause], wall, wall + elapsed))

    def stop(self) -> None:
        """The step is done: its weights are live, or on their way. What follows is measured apart."""
        self._time_per_batch = time.perf_counter() - self._started

    def report(self) -> dict[str, Any]:
        """A collective: means over the ranks; of what follows the step, the longest of any rank."""
        own = list(self._seconds.values())
        sums, longest = self._ranks.sum_and_max(own[: len(DURING_STEP)], own[len(DURING_STEP) :])
        means = (sums / self._ranks.world_size).tolist()
        seconds = dict(zip(self._seconds, (*means, *longest.tolist()), strict=True))
        return {
            **{f"seconds_{cause}": value for cause, value in seconds.items()},
            "time_per_batch": self._time_per_batch,
            "spans": self._spans,
        }
