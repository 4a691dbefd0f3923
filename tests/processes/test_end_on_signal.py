"""A signal is heard whatever the main thread does; a second one, or the time, ends the process."""

import signal
import subprocess
import sys
import time

import pytest

from async_grpo.processes.look import request_look

PROGRAM = """
import hashlib, sys
from async_grpo.processes.end_on_signal import end_in_order
end_in_order(lambda name: print("asked", name, flush=True), {grace_s}, is_failing=lambda: {failing})
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"busy", b"", 10**9)  # C code: no Python handler runs before its end
"""


@pytest.fixture
def start():
    started = []

    def start(grace_s: float = 60.0, failing: bool = False) -> subprocess.Popen[str]:
        program = PROGRAM.format(grace_s=grace_s, failing=failing)
        started.append(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_first_signal_asks_and_a_later_one_ends_at_once(start):
    process = start()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "asked SIGTERM\n"
    process.send_signal(signal.SIGTERM)  # of a launcher that passes it on, too
    time.sleep(2.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 128 + signal.SIGINT


def test_without_a_checkpoint_in_time_it_ends_all_the_same(start):
    process = start(grace_s=0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    assert process.stdout.read() == "asked SIGTERM\n"


def test_where_there_is_nothing_left_to_save_it_ends_unasked(start):
    process = start(failing=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM
    assert process.stdout.read() == ""


def test_who_cannot_look_is_not_taken_for_one_that_answers_sigusr1(start):
    process = start()  # as every rank but rank 0
    assert not request_look(process.pid)
