"""`end_in_order`: let a program end in order when a signal tells it to end."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_S = 2.0  # a terminal and a launcher may both pass a signal on; signals this close together count as one

log = logging.getLogger(__name__)


def end_in_order(
    ask: Callable[[str], Any], grace_s: float, *, is_failing: Callable[[], bool], look: Any = None
) -> None:
    """Call a function at SIGTERM, SIGINT and SIGHUP, after which the program is expected to end by itself.

    The process ends at once at a second signal, after `grace_s` seconds, or if nothing is left to save.

    Call `end_in_order` in the main thread, which may be inside a collective when a signal comes. Python's handlers
    would wait for the end of the collective, so a thread reads the signals from a pipe.

    Args:
        ask: Called in that thread with the name of the first signal.
        grace_s: Seconds that the program has to end.
        is_failing: Returns whether nothing is left to save, so that the process ends at the first signal.
        look: Called at SIGUSR1. Without it the process does not handle SIGUSR1, so that `request_look` does not choose it.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in SIGNALS if look is None else (*SIGNALS, signal.SIGUSR1):
        # Without a handler of Python's, the signal would not reach the pipe
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
            log.error("there is no checkpoint after %.0f s (--grace-s): ending without", grace_s)
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
            log.warning("%s: saving a checkpoint, then ending; again to end at once", name)
            ask(name)
        elif first_number is None or time.monotonic() - first_at > SAME_S:
            os._exit(128 + number)
