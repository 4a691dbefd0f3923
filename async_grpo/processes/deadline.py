"""An end to computations whose length somebody else's file decides, such as a model's chat template."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SHORTEST_S = 1e-3  # for a timer that goes on: 0 would switch it off


class _TooSlow(BaseException):  # no Exception: libraries catch those in places, and go on
    pass


@contextmanager
def interrupted_after(seconds: float, what: str) -> Iterator[None]:
    """Interrupt the block with a TimeoutError after so many seconds.

    Only the main thread gets signals: in another one the block is not interrupted. Code in C is interrupted where it
    looks for signals. A timer that runs already goes on afterwards. With 0 seconds or less, the block does not begin.
    """
    if seconds <= 0:
        raise TimeoutError(f"{what} has no time left: {seconds:g} s")
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(signum: int, frame: FrameType | None) -> None:
        raise _TooSlow

    begun = time.monotonic()
    handler = signal.signal(signal.SIGALRM, give_up)
    left_before_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TooSlow as error:
        raise TimeoutError(f"{what} takes more than {seconds:g} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_before_s:
            left_s = left_before_s - (time.monotonic() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(SHORTEST_S, left_s), interval_s)
