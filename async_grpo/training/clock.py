"""Where the seconds of a step go. Intervals are wall-clock, to be laid over those of other processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from async_grpo.training.distributed import Ranks


@dataclass
class StepClock:
    """Seconds of one step on this rank, by cause, and its compute intervals as (start, end) Unix times."""

    ranks: Ranks
    started: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(
        default_factory=lambda: {"waiting_for_experience": 0.0, "computing": 0.0, "publishing_weights": 0.0}
    )
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

    def report(self) -> dict[str, float | list[tuple[float, float]]]:
        """`seconds_<cause>` as means over ranks (a collective), time_per_batch, compute_intervals."""
        means = self.ranks.mean(list(self.seconds.values()))
        return {
            **{f"seconds_{cause}": mean for cause, mean in zip(self.seconds, means, strict=True)},
            "time_per_batch": time.perf_counter() - self.started,
            "compute_intervals": self.compute_intervals,
        }
