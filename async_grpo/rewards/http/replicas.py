"""`Replicas`: which of several equal addresses gets the next request; `first_answer`: when a second one gets it, too.

Each has a circuit breaker: failures in a row take it out of service, and then one request at a time probes it. (Of the
libraries that were looked at, aiobreaker and purgatory know one address: they neither choose among several, nor let
callers wait for a probe, nor obey a `Retry-After`.)

    closed --- `failures` in a row ---> open --- a pause later ---> half-open: one probe
      ^----------- probe succeeds -----------------------------------'  (it fails: open, for half as long again)
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from async_grpo.rewards.http.deadline import Deadline
from async_grpo.rewards.http.endpoint import JudgeUnavailable

logger = logging.getLogger(__name__)

MAX_PAUSE_S = (
    300.0  # a server that asks for more is not waited for; after that one request may see if it still does
)
NOTICEABLE_PAUSE_S = 10.0  # a pause from which on the console is told
ENOUGH, REMEMBERED = 20, 500  # latencies before a quantile of them means anything, and at most
FIRST_PROBE, GROWTH = (
    1 / 16,
    1.5,
)  # of `reset_s`, and from probe to probe: what fails for a moment is soon back


class Replica:
    """One address: its breaker, its requests in flight, and until when it asked to be left alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = self.sent = self.failures = 0
        self.paused_until, self.asked_s = 0.0, 0.0
        self.open_until: float | None = None  # None: the breaker is closed
        self.open_s = 0.0  # how long it was opened for the last time
        self.probing = False
        self.last_failure = ""

    def ready_at(self) -> float:
        """When the next request may be sent; inf while a probe is on its way."""
        if self.open_until is None:
            return self.paused_until
        return math.inf if self.probing else max(self.open_until, self.paused_until)

    def state(self, now: float) -> str:
        """`closed`, `open` or `half-open`."""
        if self.open_until is None:
            return "closed"
        return "half-open" if self.probing or now >= self.open_until else "open"

    def describe(self, now: float) -> str:
        paused = (
            f", asked to be left alone for {self.asked_s:.6g} s"
            if self.asked_s and self.paused_until > now
            else ""
        )
        last = f" (the last failure: {self.last_failure})" if self.last_failure else ""
        return f"{self.url} is {self.state(now)}{paused}{last}"


@dataclass
class Lease:
    """The right to send one request to a replica; `settle` it."""

    replica: Replica
    probe: bool
    settled: bool = False


class Replicas:
    """The least busy of those in service. Moments are those of `time.monotonic`.

    Args:
        urls: the addresses.
        failures: in a row, that take one out of service.
        reset_s: the longest time between two probes of one that is; the first comes after a sixteenth of it.
    """

    def __init__(self, urls: Sequence[str], failures: int, reset_s: float) -> None:
        self._replicas = [Replica(url) for url in urls]
        self._max_failures, self._reset_s = failures, reset_s
        self._changed = asyncio.Event()  # replaced each time that it is set
        self.num_opened = 0

    def states(self) -> dict[str, str]:
        """By address: the state of its breaker."""
        now = time.monotonic()
        return {replica.url: replica.state(now) for replica in self._replicas}

    async def ready(self, deadline: Deadline) -> Lease | None:
        """Wait until a request may be sent to some replica; a lease if this request is to be a probe.

        Where a replica asked to be left alone (`Retry-After`), the wait puts the deadline off; where all are out of order
        it does not, or a judge that is gone would be heard of too late.

        Raises:
            JudgeUnavailable: none may be before the deadline, with the last failure of each.
        """
        while True:
            now = time.monotonic()
            due = [r for r in self._replicas if r.open_until is not None and now >= r.ready_at()]
            if due:
                due[0].probing = True
                return self._lease(due[0], probe=True)
            first = min(self._replicas, key=Replica.ready_at)
            if (ready_at := first.ready_at()) <= now:
                return None
            paused = [r for r in self._replicas if r.open_until is None and r.paused_until > now]
            probing = any(replica.probing for replica in self._replicas)
            give_up = deadline.latest if paused else deadline.at
            too_long = first in paused and first.asked_s > MAX_PAUSE_S and not probing
            if now >= give_up or too_long or (ready_at > give_up and not probing):
                described = "; ".join(replica.describe(now) for replica in self._replicas)
                raise JudgeUnavailable(f"no replica may be asked before the deadline: {described}")
            changed = self._changed
            with (
                contextlib.suppress(TimeoutError),
                deadline.put_off() if paused else contextlib.nullcontext(),
            ):
                async with asyncio.timeout(min(ready_at, give_up) - now):
                    await changed.wait()

    def take(self, tried: Collection[str], never: str | None = None) -> Lease | None:
        """A lease of the least busy replica in service, rather one that was not tried; None if there is none."""
        usable = self._usable(never)
        if not usable:
            return None
        return self._lease(min(usable, key=lambda r: (r.url in tried, r.in_flight, r.sent)), probe=False)

    def has_other(self, url: str) -> bool:
        """Whether another replica than that one is in service."""
        return bool(self._usable(never=url))

    def pause(self, replica: Replica, seconds: float) -> None:
        """The replica asked to be left alone for so long."""
        now = time.monotonic()
        if seconds >= NOTICEABLE_PAUSE_S and now >= replica.paused_until:
            obeyed = "it is waited for" if seconds <= MAX_PAUSE_S else "calls fail meanwhile"
            logger.warning(
                "the judge at %s asks to be left alone for %.6g s: %s", replica.url, seconds, obeyed
            )
        until = now + min(seconds, MAX_PAUSE_S)
        if until > replica.paused_until:
            replica.paused_until, replica.asked_s = until, seconds

    def settle(self, lease: Lease, healthy: bool | None, failure: str = "") -> None:
        """The request is over; `healthy` None says nothing of the replica. A second time is ignored."""
        if lease.settled:
            return
        lease.settled = True
        replica, now = lease.replica, time.monotonic()
        replica.in_flight -= 1
        replica.last_failure = failure or replica.last_failure
        if lease.probe:
            self._end_probe(replica, healthy, now)
        elif healthy:  # of before the breaker opened, if it is open: the probe has the last word
            replica.failures = 0
        elif healthy is not None:
            replica.failures += 1
            if replica.open_until is None and replica.failures >= self._max_failures:
                replica.open_s = self._reset_s * FIRST_PROBE
                replica.open_until = now + replica.open_s
                self.num_opened += 1
                logger.warning("a judge is out of service for a while: %s", replica.describe(now))
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_probe(self, replica: Replica, healthy: bool | None, now: float) -> None:
        replica.probing = False
        if healthy:
            logger.warning("the judge at %s is back in service", replica.url)
            replica.open_until, replica.failures, replica.last_failure = None, 0, ""
        elif healthy is not None:  # None: it was given up, and the next request may probe
            replica.open_s = min(GROWTH * replica.open_s, self._reset_s)
            replica.open_until = now + replica.open_s

    def _usable(self, never: str | None) -> list[Replica]:
        now = time.monotonic()
        return [r for r in self._replicas if r.open_until is None and r.ready_at() <= now and r.url != never]

    def _lease(self, replica: Replica, probe: bool) -> Lease:
        replica.in_flight += 1
        replica.sent += 1
        return Lease(replica, probe)


class Latencies:
    """The last 500 latencies, in seconds.

    >>> latencies = Latencies()
    >>> latencies.quantile(0.5) is None
    True
    >>> for milliseconds in range(1, 101): latencies.add(milliseconds / 1000)
    >>> latencies.quantile(0.5), latencies.quantile(0.95)
    (0.05, 0.095)
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def quantile(self, share: float, enough: int = ENOUGH) -> float | None:
        """The nearest-rank quantile; None before there are `enough`."""
        if len(self._seconds) < enough:
            return None
        return sorted(self._seconds)[math.ceil(share * len(self._seconds)) - 1]


async def first_answer(
    start: Callable[[asyncio.Future[str]], Awaitable[Any]],
    rival: Callable[[str], Awaitable[Any]],
    patience_s: float,
) -> Any:
    """Hedged requests (Dean and Barroso, "The Tail at Scale", 2013): the slow few get a rival, and the first answer wins.

    What `start` returns, or its `rival`, which is started when `start` goes on for longer than `patience_s`. The
    first to return wins and the other is cancelled; one that fails leaves it to the other. If both fail, the error is
    that of `start`.

    Args:
        start: gets a future to set when its request leaves (patience begins there), to where it went.
        rival: gets where that was.
    """
    sent: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(start(sent))]
    try:
        await asyncio.wait([tasks[0], sent], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({tasks[0]}, timeout=patience_s)
        if not tasks[0].done():
            tasks.append(asyncio.ensure_future(rival(sent.result())))
        for task in asyncio.as_completed(tasks):
            try:
                return await task
            except Exception:
                continue  # the other one may still answer
        return await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the loser's permit is back before we are
