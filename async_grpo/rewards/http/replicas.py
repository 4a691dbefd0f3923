"""`Replicas` chooses which of several equivalent servers gets the next request.

Each replica has a circuit breaker. Consecutive failures take the replica out of service. Then only one request at a
time is sent to it as a probe, until a probe succeeds. The libraries aiobreaker and purgatory cannot choose among
addresses, let callers wait, or obey `Retry-After`.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Collection, Sequence

from async_grpo.rewards.http.endpoint import Deadline, JudgeUnavailable

logger = logging.getLogger(__name__)

LOGGED_PAUSE_S = 10.0  # shortest requested pause that is logged, in seconds
MAX_PAUSE_S = 300.0  # longest requested pause for which calls wait, in seconds
# The first probe comes early, so that a server that failed only briefly is soon in service again
FIRST_PROBE = 1 / 16  # time until the first probe, as a fraction of `reset_s`
GROWTH = 1.5  # factor by which the time between probes grows


class Replica:
    """The state of one replica. Times are from `time.monotonic`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.in_flight = 0  # number of requests in flight
        self.sent = 0  # number of requests so far
        self.failures = 0  # number of consecutive failures
        self.paused_until = 0.0  # end of the pause that the server requested
        self.requested_pause_s = 0.0  # length of that pause, in seconds
        self.open_until: float | None = None  # time of the next probe; None while the replica is in service
        # seconds between the last probe (or the time at which the replica went out of service) and the next probe
        self.open_s = 0.0
        self.is_probing = False  # whether a probe is in flight, while the replica is out of service
        self.last_failure = ""

    def ready_at(self) -> float:
        """Return the time at which the next request may be sent. It is infinite while a probe is in flight."""
        return math.inf if self.is_probing else max(self.open_until or 0.0, self.paused_until)

    def describe(self) -> str:
        """Return the state as text, for messages."""
        is_paused = self.paused_until > time.monotonic()
        pause = f", asked to be left alone for {self.requested_pause_s:.6g} s" if is_paused else ""
        last_failure = f" (the last failure: {self.last_failure})" if self.last_failure else ""
        return f"{self.url} is {'out of' if self.open_until else 'in'} service{pause}{last_failure}"


class Replicas:
    """The replicas of one judge. Times are from `time.monotonic`.

    Args:
        urls: The addresses of the replicas.
        failures: Number of consecutive failures after which a replica is out of service.
        reset_s: Maximum time between two probes of a replica that is out of service. The first probe comes after a
            sixteenth of this time.
    """

    def __init__(self, urls: Sequence[str], failures: int, reset_s: float) -> None:
        self._replicas = [Replica(url) for url in urls]
        self._max_failures = failures
        self._reset_s = reset_s
        self._changed = asyncio.Event()  # wakes waiting calls; replaced each time it is set
        self.num_opened = 0  # how often a replica went out of service

    @property
    def num_open(self) -> int:
        """Return the number of replicas that are out of service now."""
        return sum(replica.open_until is not None for replica in self._replicas)

    async def ready(self, deadline: Deadline) -> None:
        """Wait until a request or a probe may be sent to at least one replica.

        A wait that a server requested with `Retry-After` extends the deadline. A wait while all replicas are out of
        service does not extend it, so that calls to an unreachable judge fail in time.

        Raises:
            JudgeUnavailable: No request may be sent before the deadline.
        """
        while not self.usable():
            now = time.monotonic()
            first = min(self._replicas, key=Replica.ready_at)
            ready_at = first.ready_at()
            is_some_in_service = self.num_open < len(self._replicas)
            give_up_at = deadline.latest if is_some_in_service else deadline.at
            is_pause_too_long = first.open_until is None and first.requested_pause_s > MAX_PAUSE_S
            is_hopeless = ready_at > give_up_at or is_pause_too_long
            is_probing = any(replica.is_probing for replica in self._replicas)
            if now >= give_up_at or (is_hopeless and not is_probing):
                descriptions = "; ".join(replica.describe() for replica in self._replicas)
                raise JudgeUnavailable(f"no replica may be asked before the deadline: {descriptions}")
            extension = deadline.put_off() if is_some_in_service else contextlib.nullcontext()
            with contextlib.suppress(TimeoutError), extension:
                async with asyncio.timeout(min(ready_at, give_up_at) - now):
                    await self._changed.wait()

    def usable(self, never: str | None = None) -> list[Replica]:
        """Return the replicas to which a request may be sent now, except the one with the address `never`."""
        now = time.monotonic()
        return [replica for replica in self._replicas if replica.ready_at() <= now and replica.url != never]

    def take(self, tried: Collection[str], never: str | None = None) -> Replica | None:
        """Choose the replica for a request that is sent now. The caller must call `settle` afterwards.

        Replicas that are due for a probe come first, then replicas that were not tried, then the least busy ones.

        Args:
            tried: Addresses to which the call has already sent a request.
            never: Address to which the request must not be sent.

        Returns:
            The replica, with `is_probing` set if it is out of service, or None if no replica can take a request.
        """
        usable_replicas = self.usable(never)
        if not usable_replicas:
            return None

        def rank(replica: Replica) -> tuple[bool, bool, int, int]:
            return replica.open_until is None, replica.url in tried, replica.in_flight, replica.sent

        chosen = min(usable_replicas, key=rank)
        chosen.is_probing = chosen.open_until is not None
        chosen.in_flight += 1
        chosen.sent += 1
        return chosen

    def pause(self, replica: Replica, seconds: float) -> None:
        """Send no requests to a replica for some time, because its server requested it."""
        until = time.monotonic() + min(seconds, MAX_PAUSE_S)
        if until > replica.paused_until:
            replica.paused_until = until
            replica.requested_pause_s = seconds
            if seconds >= LOGGED_PAUSE_S:
                logger.warning("the judge at %s asks to be left alone for %g s", replica.url, seconds)

    def settle(self, replica: Replica, probe: bool, healthy: bool | None, failure: str = "") -> None:
        """Record the end of a request.

        Args:
            replica: The replica to which the request was sent.
            probe: Whether the request was a probe.
            healthy: Whether the server works, or None if the request does not show this.
            failure: Description of the failure, or "".
        """
        replica.in_flight -= 1
        replica.last_failure = failure or replica.last_failure
        if probe:
            # Also reset this if the probe was cancelled, so that the next request becomes a probe
            replica.is_probing = False
        if probe and healthy:
            logger.warning("the judge at %s is back in service", replica.url)
            replica.open_until = None
            replica.failures = 0
            replica.last_failure = ""
        elif probe and healthy is False:
            self._open(replica, min(GROWTH * replica.open_s, self._reset_s))
        elif replica.open_until is None and healthy is not None:
            # While a replica is out of service, only the results of probes count, so earlier requests are ignored
            replica.failures = 0 if healthy else replica.failures + 1
            if replica.failures >= self._max_failures:
                self._open(replica, self._reset_s * FIRST_PROBE)
                self.num_opened += 1
                logger.warning("a judge is out of service for a while: %s", replica.describe())
        self._changed.set()
        self._changed = asyncio.Event()

    def _open(self, replica: Replica, seconds: float) -> None:
        """Keep a replica out of service until its next probe, which is due after `seconds`."""
        replica.open_s = seconds
        replica.open_until = time.monotonic() + seconds
