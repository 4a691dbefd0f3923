"""`StallWatch`: how long an engine that has work has made no progress (`--engine-stall-s`)."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from async_grpo.inference.requests import RequestTimes, TokenTimeline


class StallWatch:
    """Measures the silence of one engine.

    Args:
        timeline: Notes each progress of the engine.
        requests: The engine's requests.
    """

    def __init__(self, timeline: TokenTimeline, requests: RequestTimes) -> None:
        self._timeline = timeline
        self._requests = requests
        self._num_trainer_calls = 0  # unfinished updates and canaries; they count as work of the engine

    @contextmanager
    def working_for_trainer(self) -> Iterator[None]:
        """Count the block as work of the engine, so that `--engine-stall-s` applies to it as to requests."""
        self._num_trainer_calls += 1
        self._timeline.last_progress = time.monotonic()
        try:
            yield
        finally:
            self._num_trainer_calls -= 1

    def silence_s(self, *, is_paused: bool) -> float:
        """Return the seconds since the last progress; 0 if the engine has no work.

        Args:
            is_paused: Whether requests are held, so that they are no work. While the NCCL transport has paused the engine,
                or while the engine sleeps, it waits for the trainer, which is not a stall.
        """
        has_requests = self._requests.num_unfinished > 0 and not is_paused
        if not (self._num_trainer_calls or has_requests):
            return 0.0
        return time.monotonic() - self._timeline.last_progress
