"""`Deadline`: until when a call may work; what it waits for its turn is not its own time."""

import contextlib
import math
import time
from collections.abc import Iterator


class Deadline:
    """A moment of `time.monotonic`, put off by every wait in a queue.

    Requests of one call that run at once share it: it stands still as long as any of them waits for its turn.

    Args:
        at: the moment.
        latest: beyond which it is not put off; not given: it stays where it is.

    >>> deadline = Deadline(time.monotonic() + 1, latest=math.inf)
    >>> with deadline.put_off():
    ...     time.sleep(0.01)
    >>> deadline.queue_s >= 0.01 and 0.99 < deadline.left_s <= 1
    True
    """

    def __init__(self, at: float, latest: float | None = None) -> None:
        self._at, self.latest = at, at if latest is None else latest
        self._waiting, self._since = 0, 0.0
        self._queue_s = 0.0  # of waits that are over

    @property
    def queue_s(self) -> float:
        """Seconds that it was put off so far."""
        return self._queue_s + (time.monotonic() - self._since if self._waiting else 0.0)

    @property
    def at(self) -> float:
        """The moment, as it stands now."""
        return min(self._at + self.queue_s, self.latest)

    @property
    def left_s(self) -> float:
        """Seconds until then; negative afterwards."""
        return self.at - time.monotonic()

    @property
    def most_s(self) -> float:
        """Seconds that a wait in a queue may take from now on."""
        return self.latest - time.monotonic()

    @contextlib.contextmanager
    def put_off(self) -> Iterator[None]:
        """What is inside is a wait in a queue."""
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._queue_s += time.monotonic() - self._since

    @classmethod
    def of(cls, moment: "Deadline | float") -> "Deadline":
        """A fixed moment as one, or itself."""
        return moment if isinstance(moment, Deadline) else cls(moment)


def after(timeout_s: float, queue_s: float = math.inf) -> Deadline:
    """In so many seconds, put off by as many at most."""
    now = time.monotonic()
    return Deadline(now + timeout_s, now + timeout_s + queue_s)
