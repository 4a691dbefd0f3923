"""Time limits for computations whose duration depends on data from others, such as a model's chat template."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SHORTEST_S = 1e-3  # minimum time for restoring an earlier timer; 0 would turn that timer off


class _TooSlow(BaseException):
    """Raised in the block when its time is over.

    It is not an `Exception`, because libraries may catch those and continue.
    """


@contextmanager
def interrupted_after(seconds: float, work: str) -> Iterator[None]:
    """Interrupt the block with a TimeoutError after this number of seconds.

    C code is interrupted only where it checks for signals. The matching of regular expressions does so. If the process
    had set a timer before, it continues after the block. With 0 seconds or less, the block does not run.

    Raises:
        TimeoutError: The block took longer, or `seconds` is 0 or less.
        ValueError: This is not the main thread. Only the main thread gets signals, so the block could not be
            interrupted.
    """
    if seconds <= 0:
        raise TimeoutError(f"{work} has no time left: {seconds:g} s")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"{work} is limited to {seconds:g} s by a signal, which only the main thread of a process gets, and this is "
            f"thread {threading.current_thread().name!r}: call it in the main thread, or in a process of its own"
        )

    is_running = True

    def give_up(signum: int, frame: FrameType | None) -> None:
        # If the signal arrives after the end of the block, before the timer is turned off, ignore it
        if is_running:
            raise _TooSlow

    begin = time.monotonic()
    left_before_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
        is_running = False
    except _TooSlow as error:
        raise TimeoutError(f"{work} takes more than {seconds:g} s") from error
    finally:
        is_running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Discard a signal that has not been delivered yet. With the default handler, it would end the process
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, handler)
        if left_before_s:
            left_s = left_before_s - (time.monotonic() - begin)
            signal.setitimer(signal.ITIMER_REAL, max(SHORTEST_S, left_s), interval_s)
