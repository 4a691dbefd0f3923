"""A program that is told to end does so in order first: `end_in_order`."""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_S = 2.0  # a terminal and a launcher may both pass a signal on: within this time it is one

log = logging.getLogger(__name__)


def end_in_order(
    ask: Callable[[str], Any], grace_s: float, *, is_failing: Callable[[], bool], look: Any = None
) -> None:
    """From now on SIGTERM, SIGINT and SIGHUP have `ask` called, in a thread, with the signal's name, and SIGUSR1 `look`,
    where there is one: else who asks a run what it waits for would take this process for the one that answers.

    The process ends at once by a second signal, after `grace_s` seconds, or if `is_failing` says that there is nothing
    left to save. To be called in the main thread, which may be inside a collective when a signal comes: Python's handlers
    would wait for its end, so a thread reads the signals from a pipe.
    """
    came, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    for number in SIGNALS if look is None else (*SIGNALS, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)

    def listen() -> None:
        first: tuple[int, float] | None = None  # the signal, and when it came
        while True:
            left = None if first is None else max(0.0, first[1] + grace_s - time.monotonic())
            if not select.select([came], [], [], left)[0]:
                assert first is not None
                log.error("there is no checkpoint after %.0f s (--grace-s): ending without", grace_s)
                os._exit(128 + first[0])
            number = os.read(came, 1)[0]
            if number == signal.SIGUSR1 and look is not None:
                look()
            elif number in SIGNALS and first is None and not is_failing():
                first, name = (number, time.monotonic()), signal.Signals(number).name
                log.warning("%s: saving a checkpoint, then ending; again to end at once", name)
                ask(name)
            elif number in SIGNALS and (first is None or time.monotonic() - first[1] > SAME_S):
                os._exit(128 + number)

    threading.Thread(target=listen, name="end-on-signal", daemon=True).start()
