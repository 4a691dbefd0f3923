"""An end to computations that would not end. For the main thread of a process, where signals arrive."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooSlow(BaseException):
    """The computation took too long. No Exception: libraries catch those here and there, and go on."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds. ValueError outside the main thread.

    Code in C is interrupted only where it looks for signals, as matching a regular expression does.
    """

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TooSlow

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
