"""Where the seconds of a step go. Intervals are wall-clock, to be laid over those of other processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from async_grpo.training.distributed import Ranks

DURING_STEP = ("waiting_for_experience", "computing", "publishing_weights")
AFTER_STEP = ("evaluating", "checkpointing")  # not part of `time_per_batch`; not every rank has a part in it


@dataclass
class StepClock:
    """Seconds of one step on this rank, by cause, and its compute intervals as (start, end) Unix times."""

    ranks: Ranks
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*DURING_STEP, *AFTER_STEP), 0.0))
    time_per_batch: float = 0.0
    compute_intervals: list[tuple[float, float]] = field(default_factory=list)

    @contextmanager
    def measure(self, cause: str) -> Iterator[None]:
        """Add the time of the `with` block to `cause`; waits for the device, or its work is uncounted."""
        wall, start = time.time(), time.perf_counter()
        yield
        self.ranks.synchronize()
        elapsed = time.perf_counter() - start
        self.seconds[cause] += elapsed
        if cause == "computing":
            self.compute_intervals.append((wall, wall + elapsed))

    def stop(self) -> None:
        """The step is done: its weights are live. What follows is measured apart."""
        self.time_per_batch = time.perf_counter() - self.started

    def report(self) -> dict[str, float | list[tuple[float, float]]]:
        """`seconds_<cause>` (a collective), time_per_batch, compute_intervals.

        Means over the ranks; of what follows the step, the longest of any rank.
        """
        means = self.ranks.mean([self.seconds[cause] for cause in DURING_STEP])
        longest = self.ranks.max([self.seconds[cause] for cause in AFTER_STEP])
        seconds = zip((*DURING_STEP, *AFTER_STEP), (*means, *longest), strict=True)
        return {
            **{f"seconds_{cause}": value for cause, value in seconds},
            "time_per_batch": self.time_per_batch,
            "compute_intervals": self.compute_intervals,
        }
