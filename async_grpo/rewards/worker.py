"""What a lane asks of a worker, and how long it waits for it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.types import AdapterResult


class VerifierWorker(Protocol):
    """Scores one sample at a time."""

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult:
        """The result, TIMED_OUT after `timeout_s`. Raises when the worker, not the adapter, is broken.

        When cancelled, it stops the work and raises CancelledError once it is ready for another sample.
        """
        ...

    async def close(self) -> None: ...


MakeWorker = Callable[[str], Awaitable[VerifierWorker]]


@dataclass(frozen=True)
class Patience:
    """The deadlines of a lane, in seconds."""

    timeout_s: float = 30.0  # for scoring one sample, from when a worker takes it
    grace_s: float = 10.0  # for the worker to say so, to obey a cancellation, or to close
    make_s: float = 120.0  # for making one worker
    backoff_s: tuple[float, ...] = (0.0, 1.0, 5.0)  # before each attempt to make one
    regrow_s: float = 30.0  # between attempts to make one that could not be made
