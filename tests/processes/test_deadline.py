"""A computation has the time that it is given; with no time left it does not begin."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from async_grpo.processes.deadline import interrupted_after


@pytest.mark.parametrize("seconds", [0, 0.0, -1.5])
def test_a_block_with_no_time_left_does_not_begin(seconds):
    has_begun = False
    is_refused = pytest.raises(TimeoutError, match="the template has no time left")
    with is_refused, interrupted_after(seconds, "the template"):
        has_begun = True
    assert not has_begun


def test_a_block_that_does_not_end_is_interrupted():
    is_refused = pytest.raises(TimeoutError, match="the template takes more than 0.05 s")
    with is_refused, interrupted_after(0.05, "the template"):
        time.sleep(60)


def test_a_signal_that_comes_as_the_block_has_just_ended_interrupts_nothing(monkeypatch):
    set_timer = signal.setitimer

    def set_late(timer: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        if seconds == 0:
            signal.raise_signal(signal.SIGALRM)
        return set_timer(timer, seconds, interval)

    handler = signal.getsignal(signal.SIGALRM)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "setitimer", set_late)
        with interrupted_after(60, "the template"):
            pass
    assert signal.getsignal(signal.SIGALRM) == handler


def test_a_signal_that_is_delivered_after_the_block_does_not_end_the_process():
    """As where the kernel has given it to another thread, which has not run yet."""
    code = """
import os, signal
from async_grpo.processes.deadline import interrupted_after
with interrupted_after(60, "the template"):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    os.kill(os.getpid(), signal.SIGALRM)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
print("alive", signal.getsignal(signal.SIGALRM) is signal.SIG_DFL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["alive", "True"])


def test_outside_the_main_thread_where_no_signal_arrives_the_block_does_not_begin():
    outcomes = []

    def call() -> None:
        try:
            with interrupted_after(60, "the template"):
                outcomes.append("begun")
        except ValueError as error:
            outcomes.append(str(error))

    thread = threading.Thread(target=call, name="reader")
    thread.start()
    thread.join(timeout=60)
    assert len(outcomes) == 1
    assert "the template is limited to 60 s by a signal" in outcomes[0]
    assert "this is thread 'reader': call it in the main thread" in outcomes[0]
