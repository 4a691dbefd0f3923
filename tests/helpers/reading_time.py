"""Show by an eighth of a long text that the whole text is read in time.

Reading in quadratic time takes 64 times as long for a text of eight times the length. So if an eighth takes less than a
64th of the limit, the whole takes less than the limit, on any machine: both are measured on the same one. Where an eighth
takes longer, which most texts do not, the whole is read.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SHARE = 8


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


def is_surely_read_in_time(read: Callable[[], Any], limit_s: float, what: str) -> bool:
    """Read an eighth of a text, and tell whether reading the whole surely takes less than the limit."""
    begin_s = time.process_time()
    with within(limit_s, what):
        read()
    return (time.process_time() - begin_s) * SHARE**2 < limit_s


def check_reading_time(
    read: Callable[[str], Any], text_of: Callable[[int], str], count: int, limit_s: float
) -> None:
    """Fail unless `read` takes less than the limit for the text of this count, of which an eighth may show it.

    Args:
        read: Reads a text.
        text_of: Returns a text whose length is proportional to its argument.
        count: The argument for the whole text.
        limit_s: Seconds of processor time.
    """
    what = f"{text_of(1)[:40]!r}, {count} times"
    short, whole = text_of(count // SHARE), text_of(count)
    if not is_surely_read_in_time(lambda: read(short), limit_s, what):
        with within(limit_s, what):
            read(whole)
