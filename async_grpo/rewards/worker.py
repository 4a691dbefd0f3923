"""What a lane asks of a worker, and how long it waits for it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.types import AdapterResult


class VerifierWorker(Protocol):
    """Scores samples with one reward, one or several at a time. A lane may assume

    - `capacity` is known once the worker is made, and does not change: as many calls, of both kinds together, may be
      in flight; more wait their turn inside, on their own time.
    - A call returns within `timeout_s`, a few seconds for stopping the work, and the time to start a process.
    - What a sample does costs that sample alone: it is FAILED or TIMED_OUT, and the worker goes on.
    - WorkerLost (or any other error) means that the sample is not to blame, as far as the worker knows: it may be
      given to another worker, this one must be closed. All its other calls in flight end, too, most of them
      with the same error: each sample is to be tried again, once for each.
    - A cancelled call ends once its place is free for another sample.
    """

    @property
    def capacity(self) -> int: ...

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult: ...

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult], timeout_s: float
    ) -> list[AdapterResult]:
        """The results of a whole group after the reward's `post_process_scores`; as they are if it has none."""
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
