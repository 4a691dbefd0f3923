"""`Replicas`: which of several equal addresses gets the next request."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from async_grpo.rewards.http.breaker import Breaker
from async_grpo.rewards.http.deadline import Deadline
from async_grpo.rewards.http.endpoint import JudgeUnavailable

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 300.0  # whatever a server asks for: after that one request may see whether it still means it


class Replica:
    """One address: its breaker, its requests in flight, and until when it asked to be left alone."""

    def __init__(self, url: str, breaker: Breaker) -> None:
        self.url, self.breaker = url, breaker
        self.in_flight = self.sent = 0
        self.paused_until = 0.0

    @property
    def ready_at(self) -> float:
        return max(self.breaker.ready_at, self.paused_until)


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
        failures, reset_s: of each one's `Breaker`.
    """

    def __init__(self, urls: Sequence[str], failures: int, reset_s: float) -> None:
        self._replicas = [Replica(url, Breaker(failures, reset_s)) for url in urls]
        self._changed = asyncio.Event()  # replaced each time that it is set

    @property
    def in_flight(self) -> int:
        return sum(replica.in_flight for replica in self._replicas)

    def states(self) -> dict[str, str]:
        """By address: the state of its breaker."""
        now = time.monotonic()
        return {replica.url: replica.breaker.state(now) for replica in self._replicas}

    async def ready(self, deadline: Deadline) -> Lease | None:
        """Wait until a request may be sent to some replica; a lease if this request is to be a probe.

        Where a replica asked to be left alone (`Retry-After`), the wait puts the deadline off; where all are out of order
        it does not, or nobody would hear of a judge that is gone.

        Raises:
            JudgeUnavailable: none may be before the deadline.
        """
        while True:
            now = time.monotonic()
            due = [r for r in self._replicas if r.breaker.may_probe(now) and now >= r.paused_until]
            if due:
                due[0].breaker.begin_probe()
                return self._lease(due[0], probe=True)
            ready_at = min(replica.ready_at for replica in self._replicas)
            if ready_at <= now:
                return None
            asked_to_wait = any(r.breaker.closed and r.paused_until > now for r in self._replicas)
            probing = any(replica.breaker.probing for replica in self._replicas)
            give_up = deadline.latest if asked_to_wait else deadline.at
            if now >= give_up or (ready_at > give_up and not probing):
                raise JudgeUnavailable(f"no replica may be asked before the deadline: {self._describe(now)}")
            changed = self._changed
            with (
                contextlib.suppress(TimeoutError),
                deadline.put_off() if asked_to_wait else contextlib.nullcontext(),
            ):
                async with asyncio.timeout(min(ready_at, give_up) - now):
                    await changed.wait()

    def take(self, tried: Collection[str], never: str | None = None) -> Lease | None:
        """A lease of the least busy replica in service, rather one that was not tried; None if there is none."""
        now = time.monotonic()
        usable = [r for r in self._replicas if r.ready_at <= now and r.breaker.closed and r.url != never]
        if not usable:
            return None
        return self._lease(min(usable, key=lambda r: (r.url in tried, r.in_flight, r.sent)), probe=False)

    def has_other(self, url: str) -> bool:
        """Whether another replica than that one is in service."""
        now = time.monotonic()
        return any(r.ready_at <= now and r.breaker.closed and r.url != url for r in self._replicas)

    def pause(self, replica: Replica, seconds: float) -> None:
        """The replica asked to be left alone for so long."""
        until = time.monotonic() + min(seconds, MAX_PAUSE_S)
        replica.paused_until = max(replica.paused_until, until)

    def settle(self, lease: Lease, healthy: bool | None) -> None:
        """The request is over; `healthy` None says nothing of the replica. A second time is ignored."""
        if lease.settled:
            return
        lease.settled = True
        lease.replica.in_flight -= 1
        breaker, now = lease.replica.breaker, time.monotonic()
        if lease.probe:
            breaker.end_probe(healthy, now)
        elif healthy:
            breaker.succeeded()
        elif healthy is not None and breaker.failed(now):
            logger.warning("a judge is out of service for a while: %s", self._describe(now))
        self._changed.set()
        self._changed = asyncio.Event()

    def _lease(self, replica: Replica, probe: bool) -> Lease:
        replica.in_flight += 1
        replica.sent += 1
        return Lease(replica, probe)

    def _describe(self, now: float) -> str:
        return ", ".join(
            f"{r.url} {r.breaker.state(now)}"
            + (f" and paused for {r.paused_until - now:.1f} s" if r.paused_until > now else "")
            for r in self._replicas
        )
