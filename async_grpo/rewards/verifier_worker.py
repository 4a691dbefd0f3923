"""What a queue asks of a worker, and how long it waits for it."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from async_grpo.errors import WorkerLost
from async_grpo.types import AdapterResult

QUEUE_S = 1800.0  # that a call may wait inside a worker with `max_queue_s`, for permits and the like


class ProcessDied(WorkerLost):
    """The worker's process died while it served this call, which may be the reason. The worker itself goes on."""


class CallInterrupted(WorkerLost):
    """The worker's process was ended for another call. This one is not to blame, and the worker goes on."""


class VerifierWorker(Protocol):
    """Scores samples with one reward, one or several at a time. It tries nothing again: its queue does.

    - `capacity` is known once the worker is made. So many calls, of both kinds together, are served at a time. Only a
      worker with a true `prefetch` is given more: its calls are served in the order in which they are made.
    - A call ends within `timeout_s` from when its turn comes; as much again may be needed for what is done before it,
      beside the time to start a process (`Timeouts.make_s`) and a few seconds to stop what runs. A worker with
      `max_queue_s` may hold a call so much longer, which it tells as the result's `queue_s`.
    - Groups are given only to a worker with a true `has_post_process` (see `GroupWorker`).
    - What goes wrong with a sample is a result, FAILED or TIMED_OUT, and costs that sample alone, or its batch.
    - ProcessDied and CallInterrupted leave the worker usable. After any other error it is closed; its other calls in
      flight then end at once with an error of their own.
    - A cancelled call ends when its place is free again, or at once while it is ahead of its turn.
    """

    @property
    def capacity(self) -> int: ...

    async def score(self, sample: dict[str, Any], timeout_s: float) -> AdapterResult: ...

    async def close(self) -> None: ...


class GroupWorker(VerifierWorker, Protocol):
    """A worker that can be given the results of a whole group, if the reward looks at groups."""

    @property
    def has_post_process(self) -> bool: ...

    async def post_process(
        self, samples: Sequence[dict[str, Any]], results: Sequence[AdapterResult], timeout_s: float
    ) -> list[AdapterResult]:
        """The results after the reward's `post_process_scores`."""
        ...


MakeWorker = Callable[[str], Awaitable[VerifierWorker]]


@dataclass(frozen=True)
class Timeouts:
    """The deadlines of a queue, in seconds."""

    timeout_s: float = 30.0  # for scoring one sample, from when its turn comes
    grace_s: float = 10.0  # for the worker to say so, to obey a cancellation, or to close
    make_s: float = 120.0  # for making one worker
    backoff_s: tuple[float, ...] = (0.0, 1.0, 5.0)  # before each attempt to make one
    regrow_s: float = 30.0  # between attempts to make one that could not be made

    @property
    def answer_s(self) -> float:
        """For one answer: another sample or batch may have to end first, and a process to be started."""
        return 2 * self.timeout_s + self.make_s + self.grace_s
