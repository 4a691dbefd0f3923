"""What a lane asks of a worker, and how long it waits for it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.types import AdapterResult

QUEUE_S = 1800.0  # that a call may wait inside a worker with `max_queue_s`, for permits and the like


class VerifierWorker(Protocol):
    """Scores samples with one reward, one or several at a time. A lane may assume:

    - `capacity` is known once the worker is made. So many calls, of both kinds together, are served at a time; others
      wait inside, on nobody's time. Only a worker with a true `prefetch` is given more: its calls are served in
      the order in which they are made, and what ends one of them harms none of those that wait.
    - A call whose turn has come ends within `timeout_s`, as much again for what is done before it, the time to start
      processes (`Timeouts.make_s`), and a few seconds to stop what runs. One of a worker with `max_queue_s` may wait so
      much longer for its turn elsewhere, which it tells as the result's `queue_s`.
    - Groups are given only to a worker with a true `has_post_process`.
    - A sample's misdeeds cost that sample alone, a batch's time-out that batch: they are FAILED or TIMED_OUT, and
      the worker goes on.
    - WorkerLost, or any other error, says that the sample is not known to be at fault: it is worth another attempt,
      by another worker, best one that is given nothing else meanwhile. This worker is to be closed. Its other
      calls in flight end at once with the same error, and each is worth another attempt, too.
    - A cancelled call ends when its place is free again, or at once while it is ahead of its turn. What the worker
      still does for it then may hold up the next call, by one time-out at most.
    """

    @property
    def capacity(self) -> int: ...

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult: ...

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult], timeout_s: float
    ) -> list[AdapterResult]:
        """The results of a whole group after the reward's `post_process_scores`."""
        ...

    async def close(self) -> None: ...


MakeWorker = Callable[[str], Awaitable[VerifierWorker]]


@dataclass(frozen=True)
class Timeouts:
    """The deadlines of a lane, in seconds."""

    timeout_s: float = 30.0  # for scoring one sample, from when a worker takes it
    grace_s: float = 10.0  # for the worker to say so, to obey a cancellation, or to close
    make_s: float = 120.0  # for making one worker
    backoff_s: tuple[float, ...] = (0.0, 1.0, 5.0)  # before each attempt to make one
    regrow_s: float = 30.0  # between attempts to make one that could not be made

    @property
    def answer_s(self) -> float:
        """For one answer: another sample or batch may have to end first, and a process to be started."""
        return 2 * self.timeout_s + self.make_s + self.grace_s
