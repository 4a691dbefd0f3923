"""`Replicas`: which of several equal addresses gets the next request.

Each has a circuit breaker: failures in a row take it out of service, and then one request at a time probes it.
(aiobreaker and purgatory neither choose among addresses, nor let callers wait, nor obey a `Retry-After`.)
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Sequence

from async_grpo.rewards.http.endpoint import Deadline, JudgeUnavailable

logger = logging.getLogger(__name__)

TOLD_S, MAX_PAUSE_S = 10.0, 300.0  # of a pause: from when it is told, and what is waited for
# Of `reset_s`, and from probe to probe: what fails for a moment is soon back
FIRST_PROBE, GROWTH = 1 / 16, 1.5


class Replica:
    """One address: its breaker, its requests in flight, and until when it asked to be left alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = self.sent = self.failures = 0
        self.paused_until, self.asked_s = 0.0, 0.0
        self.open_until: float | None = None  # None: the breaker is closed
        self.open_s = 0.0  # how long it was opened for the last time
        self.probing = False  # only while it is open
        self.last_failure = ""

    def ready_at(self) -> float:
        """When the next request may be sent; inf while a probe is on its way."""
        return math.inf if self.probing else max(self.open_until or 0.0, self.paused_until)

    def describe(self) -> str:
        paused = self.paused_until > time.monotonic()
        wish = f", asked to be left alone for {self.asked_s:.6g} s" if paused else ""
        last = f" (the last failure: {self.last_failure})" if self.last_failure else ""
        return f"{self.url} is {'open' if self.open_until else 'closed'}{wish}{last}"


class Replicas:
    """The least busy of those in service. Moments are those of `time.monotonic`.

    Args:
        failures: in a row, that take one out of service.
        reset_s: the longest time between two probes of one that is; the first comes after a sixteenth of it.
    """

    def __init__(self, urls: Sequence[str], failures: int, reset_s: float) -> None:
        self._replicas = [Replica(url) for url in urls]
        self._max_failures, self._reset_s = failures, reset_s
        self._changed = asyncio.Event()  # replaced each time that it is set
        self.num_opened = 0

    @property
    def num_open(self) -> int:
        """How many are out of service now."""
        return sum(replica.open_until is not None for replica in self._replicas)

    async def ready(self, deadline: Deadline) -> None:
        """Wait until some replica may be asked, be it by a probe. Raises JudgeUnavailable if none may in time.

        Where a replica asked for time (`Retry-After`), the wait puts the deadline off; where all are out of
        order it does not, or one heard too late of a judge that is gone.
        """
        while not self.usable():
            now, first = time.monotonic(), min(self._replicas, key=Replica.ready_at)
            ready_at = first.ready_at()
            paused = self.num_open < len(self._replicas)
            give_up = deadline.latest if paused else deadline.at
            never = ready_at > give_up or (first.open_until is None and first.asked_s > MAX_PAUSE_S)
            if now >= give_up or (never and not any(replica.probing for replica in self._replicas)):
                described = "; ".join(map(Replica.describe, self._replicas))
                raise JudgeUnavailable(f"no replica may be asked before the deadline: {described}")
            queued = deadline.put_off() if paused else contextlib.nullcontext()
            with contextlib.suppress(TimeoutError), queued:
                async with asyncio.timeout(min(ready_at, give_up) - now):
                    await self._changed.wait()

    def usable(self, never: str | None = None) -> list[Replica]:
        """Those that a request may be sent to now, `never` left out."""
        now = time.monotonic()
        return [replica for replica in self._replicas if replica.ready_at() <= now and replica.url != never]

    def take(self, tried: Collection[str], never: str | None = None) -> Replica | None:
        """One to send a request to now; then `settle` it. One that is out of order and due is `probing` then;
        else the least busy one in service, rather one that was not tried. None if there is none."""
        if not (usable := self.usable(never)):
            return None
        taken = min(usable, key=lambda r: (r.open_until is None, r.url in tried, r.in_flight, r.sent))
        taken.probing = taken.open_until is not None
        taken.in_flight += 1
        taken.sent += 1
        return taken

    def pause(self, replica: Replica, seconds: float) -> None:
        """The replica asked to be left alone for so long."""
        until = time.monotonic() + min(seconds, MAX_PAUSE_S)
        if until > replica.paused_until:
            replica.paused_until, replica.asked_s = until, seconds
            if seconds >= TOLD_S:
                logger.warning("the judge at %s asks to be left alone for %g s", replica.url, seconds)

    def settle(self, replica: Replica, probe: bool, healthy: bool | None, failure: str = "") -> None:
        """The request is over; `healthy` None says nothing of the replica."""
        replica.in_flight -= 1
        replica.last_failure = failure or replica.last_failure
        if probe:
            replica.probing = False  # of one that was given up, the next request may be another
        if probe and healthy:
            logger.warning("the judge at %s is back in service", replica.url)
            replica.open_until, replica.failures, replica.last_failure = None, 0, ""
        elif probe and healthy is False:
            self._open(replica, min(GROWTH * replica.open_s, self._reset_s))
        elif replica.open_until is None and healthy is not None:  # open, its probe has the last word
            replica.failures = 0 if healthy else replica.failures + 1
            if replica.failures >= self._max_failures:
                self._open(replica, self._reset_s * FIRST_PROBE)
                self.num_opened += 1
                logger.warning("a judge is out of service for a while: %s", replica.describe())
        self._changed.set()
        self._changed = asyncio.Event()

    def _open(self, replica: Replica, seconds: float) -> None:
        replica.open_s, replica.open_until = seconds, time.monotonic() + seconds
