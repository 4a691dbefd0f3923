"""`end_in_order`: lets a program save its state before it ends at a signal."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Seconds within which several signals count as one, because a terminal and a launcher may both pass on the same signal
SAME_S = 2.0

log = logging.getLogger(__name__)


def end_in_order(
    ask: Callable[[str], Any], grace_s: float, *, is_failing: Callable[[], bool], look: Any = None
) -> None:
    """Install handlers of SIGTERM, SIGINT and SIGHUP that ask the program to end.

    The process ends without saving in three cases: at a second signal, if `grace_s` seconds have passed since the first
    one, or at the first signal if nothing is left to save.

    Call this in the main thread. That thread may be inside a collective when a signal arrives, and Python's handlers
    would run only after the collective. Therefore another thread reads the signals from a pipe.

    Args:
        ask: Function that asks the program to end. It is called in the other thread with the name of the first signal.
        grace_s: Seconds that the program has to end.
        is_failing: Function that returns whether nothing is left to save.
        look: Function to call at SIGUSR1. If None, the process does not handle SIGUSR1, and `request_look` skips it.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in SIGNALS if look is None else (*SIGNALS, signal.SIGUSR1):
        # A handler that does nothing: Python writes a signal to the pipe only if the signal has a handler
        signal.signal(number, lambda *_: None)
    listener = threading.Thread(
        target=_listen,
        args=(read_end, ask, grace_s, is_failing, look),
        name="end-on-signal",
        daemon=True,
    )
    listener.start()


def _listen(
    read_end: int,
    ask: Callable[[str], Any],
    grace_s: float,
    is_failing: Callable[[], bool],
    look: Any,
) -> None:
    """Handle the signals that arrive in the pipe; see `end_in_order`."""
    first_number: int | None = None
    first_at = 0.0
    while True:
        left_s = None if first_number is None else max(0.0, first_at + grace_s - time.monotonic())
        has_signal = bool(select.select([read_end], [], [], left_s)[0])
        if not has_signal:
            assert first_number is not None, "without a signal, the wait has no end"
            log.error(
                "there is no checkpoint after %.0f s (--grace-s): the process ends without one", grace_s
            )
            os._exit(128 + first_number)
        number = os.read(read_end, 1)[0]
        if number == signal.SIGUSR1 and look is not None:
            look()
        elif number not in SIGNALS:
            continue
        elif first_number is None and not is_failing():
            first_number = number
            first_at = time.monotonic()
            name = signal.Signals(number).name
            log.warning("%s: the run saves a checkpoint and ends; a second signal ends it at once", name)
            ask(name)
        elif first_number is None or time.monotonic() - first_at > SAME_S:
            os._exit(128 + number)
