"""`Breaker`: takes a replica out of service after failures in a row, and lets one request at a time probe it again."""

import math


class Breaker:
    """The circuit breaker of one replica. Moments are seconds of whatever clock the caller uses.

        closed --- `failures` in a row ---> open --- `reset_s` later ---> half-open: one probe
          ^----------- probe succeeds ----------------------------------------'  (it fails: open again)

    >>> breaker = Breaker(failures=2, reset_s=10)
    >>> breaker.failed(now=0.0), breaker.failed(now=1.0), breaker.state(now=1.0)
    (False, True, 'open')
    >>> breaker.may_probe(now=10.9), breaker.may_probe(now=11.0)
    (False, True)
    >>> breaker.begin_probe(); breaker.may_probe(now=12.0), breaker.state(now=12.0)
    (False, 'half-open')
    >>> breaker.end_probe(healthy=True, now=12.5); breaker.state(now=12.5)
    'closed'
    """

    def __init__(self, failures: int, reset_s: float) -> None:
        self._max_failures, self._reset_s = failures, reset_s
        self._failures = 0
        self._probing = False
        self._open_until: float | None = None

    @property
    def closed(self) -> bool:
        return self._open_until is None

    @property
    def probing(self) -> bool:
        return self._probing

    @property
    def ready_at(self) -> float:
        """When the next request may be sent; inf while a probe is on its way."""
        if self._open_until is None:
            return -math.inf
        return math.inf if self._probing else self._open_until

    def state(self, now: float) -> str:
        """`closed`, `open` or `half-open`."""
        if self._open_until is None:
            return "closed"
        return "half-open" if self._probing or now >= self._open_until else "open"

    def may_probe(self, now: float) -> bool:
        return not self.closed and now >= self.ready_at

    def begin_probe(self) -> None:
        self._probing = True

    def end_probe(self, healthy: bool | None, now: float) -> None:
        """The probe came back; `healthy` None: it was given up, and the next request may probe."""
        self._probing = False
        if healthy:
            self._open_until, self._failures = None, 0
        elif healthy is not None:
            self._open_until = now + self._reset_s

    def succeeded(self) -> None:
        """A request that was no probe. If it is of before the breaker opened, the probe has the last word."""
        self._failures = 0

    def failed(self, now: float) -> bool:
        """A request that was no probe. Whether it opened the breaker; late ones do not keep it open for longer."""
        self._failures += 1
        if not self.closed or self._failures < self._max_failures:
            return False
        self._open_until = now + self._reset_s
        return True
