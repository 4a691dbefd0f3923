"""Show by an eighth of a long text that the whole text is read in time.

Reading in quadratic time takes 64 times as long for a text of eight times the length. So if an eighth takes less than a
64th of the limit, the whole takes less than the limit, on any machine: both are measured on the same one. Where an eighth
takes longer, which most texts do not, the whole is read. On a slow machine it may take longer than the limit, but at
most a few times the limit, and at most 24 times as long as the eighth.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SHARE = 8
# A whole text may take so many times as long as its eighth. Linear time takes 8 times as long, quadratic time 64 times
ALLOWED_GROWTH = 24
# On a slow machine, a whole text may take so many times as long as the limit
SLOW_MACHINE = 4


class TooSlow(BaseException):
    """No Exception, which what is fed may catch."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Raise TooSlow in the block after so many seconds of processor time, also in the middle of a match."""

    def interrupt(*_: object) -> None:
        raise TooSlow(what)

    previous = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def seconds_of(read: Callable[[], Any], limit_s: float, what: str) -> float:
    """Return the processor time in seconds that `read` takes. Raise TooSlow after `limit_s`."""
    begin_s = time.process_time()
    with within(limit_s, what):
        read()
    return time.process_time() - begin_s


def check_growth(
    read_short: Callable[[], Any], read_whole: Callable[[], Any], limit_s: float, what: str
) -> None:
    """Fail unless a text is read within the limit, or at most 24 times as long as its eighth and 4 times the limit."""
    if seconds_of(read_short, limit_s, what) * SHARE**2 < limit_s:
        return
    # What happens only at the first reading, such as compiling a pattern, is no part of the growth
    short_s = seconds_of(read_short, limit_s, what)
    allowed_s = min(max(limit_s, ALLOWED_GROWTH * short_s), SLOW_MACHINE * limit_s)
    with within(allowed_s, what):
        read_whole()


def check_reading_time(
    read: Callable[[str], Any], text_of: Callable[[int], str], count: int, limit_s: float
) -> None:
    """Check that `read` takes linear time for a text of `count` units (`check_growth`).

    Args:
        read: Reads a text.
        text_of: Returns a text whose length is proportional to its argument.
        count: The argument for the whole text.
        limit_s: Seconds of processor time.
    """
    what = f"{text_of(1)[:40]!r}, {count} times"
    short, whole = text_of(count // SHARE), text_of(count)
    check_growth(lambda: read(short), lambda: read(whole), limit_s, what)
