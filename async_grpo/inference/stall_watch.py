"""`StallWatch`: measures for how long an engine with unfinished work has made no progress (`--engine-stall-s`)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from async_grpo.inference.requests import RequestTimes, TokenTimeline


class StallWatch:
    """Measures the time since an engine's last progress.

    Args:
        timeline: Records each progress of the engine.
        requests: The engine's requests.
    """

    def __init__(self, timeline: TokenTimeline, requests: RequestTimes) -> None:
        self._timeline = timeline
        self._requests = requests
        self._num_trainer_calls = 0  # unfinished updates and canaries; they count as work of the engine

    @contextmanager
    def working_for_trainer(self) -> Iterator[None]:
        """Count the block as work of the engine, so that `--engine-stall-s` applies to it as it does to requests."""
        self._num_trainer_calls += 1
        self._timeline.last_progress = time.monotonic()
        try:
            yield
        finally:
            self._num_trainer_calls -= 1

    def silence_s(self, *, is_paused: bool) -> float:
        """Return the seconds since the last progress; 0 if the engine has no work.

        Args:
            is_paused: Whether the engine's requests are paused, so that they do not count as work. This is the case
                while the NCCL transport has paused the engine, or while it sleeps: it then waits for the trainer.
        """
        has_requests = self._requests.num_unfinished > 0 and not is_paused
        if not (self._num_trainer_calls or has_requests):
            return 0.0
        return time.monotonic() - self._timeline.last_progress
