"""A turn of the event loop that lasts too long is named, with what it does; a machine that is to blame is not code."""

import asyncio
import logging
import math
import subprocess
import sys
import textwrap
import time
from functools import cache

import pytest

from async_grpo.processes import loop_watch
from async_grpo.processes.loop_watch import LateTurn, LoopWatch, _Places, _stack_of


def watched(block, caplog, limit_s: float = 0.5, *, after_a_beat: bool = False) -> tuple[list[str], float]:
    """What is logged while `block` runs in a turn of its own, and the longest turn.

    `after_a_beat`: the watching thread has not yet seen the last heartbeat when the turn begins.
    """

    async def story() -> float:
        watch = LoopWatch(limit_s)
        watch.start()
        await asyncio.sleep(2 * loop_watch.BEAT_S)
        if after_a_beat:
            watch._timer.cancel()
            watch._beat()
        block()
        await asyncio.sleep(2 * loop_watch.BEAT_S)
        watch.stop()
        watch._watcher.join(10)
        return watch.take_longest_s()

    with caplog.at_level(logging.WARNING, logger=loop_watch.__name__):
        longest_s = asyncio.run(story())
    return [record.getMessage() for record in caplog.records if record.name == loop_watch.__name__], longest_s


def computes_in_python() -> None:
    begun = time.thread_time()
    while time.thread_time() - begun < 1.5:
        sum(range(1000))


def how_many_are_added_in(seconds: float) -> int:
    """How many numbers `sum` adds in so many seconds of a processor on this machine, at its fastest of three times."""
    sample = 4_000_000
    fastest_s = math.inf
    for _ in range(3):
        begun = time.thread_time()
        sum(range(sample))
        fastest_s = min(fastest_s, time.thread_time() - begun)
    return int(sample * seconds / fastest_s)


@cache
def numbers_for_two_seconds() -> int:
    """Measured when a test needs it: during the collection, other work may slow it down three times."""
    return how_many_are_added_in(2.0)


def computes_in_one_call() -> None:
    """One call into C that keeps Python's lock: no other thread runs before it has returned."""
    sum(range(numbers_for_two_seconds()))


def waits() -> None:
    time.sleep(1.5)


@pytest.mark.parametrize(
    ("block", "cause"),
    [(computes_in_python, "it computes"), (waits, "it waits in a call that blocks")],
)
def test_a_turn_that_lasts_too_long_is_named_with_what_it_does(block, cause, caplog):
    lines, longest_s = watched(block, caplog)
    named = [line for line in lines if f"in {block.__name__}" in line]
    assert named and "one turn of the event loop has lasted" in named[0]
    assert cause in named[0] and "test_loop_watch.py:" in named[0]
    assert longest_s > 1.0


@pytest.mark.parametrize("after_a_beat", [False, True])
def test_a_call_that_keeps_python_s_lock_is_reported_and_nothing_else_is_blamed_for_it(after_a_beat, caplog):
    """The watching thread can look only when the call has returned: at once, or in the next turn."""
    numbers_for_two_seconds()
    lines, longest_s = watched(computes_in_one_call, caplog, after_a_beat=after_a_beat)
    late = [line for line in lines if "one turn of the event loop has lasted" in line]
    assert late and all("it computes" in line for line in late), lines
    assert all("in computes_in_one_call" in line or loop_watch.UNKNOWN_PLACE in line for line in late), lines
    assert longest_s > 1.0


def test_short_turns_are_not_reported(caplog):
    lines, longest_s = watched(lambda: time.sleep(0.01), caplog, limit_s=30.0)
    assert lines == [] and longest_s < 30.0


STOPPED = """
import asyncio, logging, sys, time
from async_grpo.processes.loop_watch import LoopWatch
logging.basicConfig(stream=sys.stdout)
async def story():
    watch = LoopWatch(1.0)
    watch.start()
    await asyncio.sleep(0.6)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await asyncio.sleep(0.6)
    watch.stop()
    print("ended, longest:", watch.take_longest_s(), flush=True)
asyncio.run(story())
"""


def test_a_process_that_was_stopped_blames_no_code():
    program = [sys.executable, "-c", textwrap.dedent(STOPPED)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(19)  # SIGSTOP
        time.sleep(3.0)
        process.send_signal(18)  # SIGCONT
        said, _ = process.communicate("\n", timeout=60)
    assert "ended" in said and "one turn of the event loop" not in said, said
    longest_s = float(said.rpartition("longest:")[2])
    assert longest_s < 1.0, said  # the metric agrees with the log


@pytest.mark.parametrize(
    ("turn", "blamed_s", "cause"),
    [
        (LateTurn(3.0, computing_s=2.9, starved_s=0.1, stopped_s=0.0), 2.9, "it computes"),
        (LateTurn(3.0, computing_s=0.2, starved_s=2.7, stopped_s=0.0), 0.3, "it computes"),
        (LateTurn(24.0, computing_s=1.6, starved_s=23.5, stopped_s=0.0), 1.6, "it computes"),
        (LateTurn(3.0, computing_s=0.0, starved_s=0.0, stopped_s=3.0), 0.0, "it computes"),
        (LateTurn(3.0, computing_s=0.1, starved_s=0.0, stopped_s=0.0), 3.0, "it waits in a call that blocks"),
        (
            LateTurn(
                3.0, computing_s=0.1, starved_s=0.0, stopped_s=0.0, busiest="large-texts_0", busiest_s=2.8
            ),
            3.0,
            "the thread large-texts_0 computes and keeps Python's lock",
        ),
    ],
)
def test_time_without_a_processor_and_time_standing_still_is_not_the_code_s(turn, blamed_s, cause):
    assert turn.blamed_s == pytest.approx(blamed_s) and turn.cause == cause


def test_a_loop_that_gets_no_processor_names_the_machine_and_no_code(caplog, monkeypatch):
    """The kernel says that the thread was ready all the time."""
    begun = time.monotonic()
    monkeypatch.setattr(LoopWatch, "_starved_s", lambda self: time.monotonic() - begun)
    lines, longest_s = watched(waits, caplog)
    assert lines and all("got no processor" in line for line in lines)
    assert longest_s < 0.5


def test_a_thread_that_keeps_python_s_lock_is_named():
    watch = LoopWatch()
    watch._thread_id, watch._native_id, watch._starved_at_beat_s = 1, 1, 0.0
    watch._starved_s = lambda: 0.0  # type: ignore[method-assign]
    own = {thread_id: cpu_s - 5.0 for thread_id, cpu_s in loop_watch._thread_times().items()}
    turn = watch._late_turn(5.0, 4.9, own, computed_s=5.0)
    assert turn.busiest == "MainThread" and turn.busiest_s >= 5.0 and turn.stopped_s == 0.0


def test_a_place_is_logged_with_growing_pauses(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(loop_watch.time, "monotonic", lambda: clock[0])
    places, lines = _Places(), []
    for second in range(7200):
        clock[0] = float(second)
        if places.may_log("a.py:1 in f"):
            lines.append(second)
    assert lines[:4] == [0, 10, 30, 70] and len(lines) < 20
    assert places.may_log("another")


def test_the_place_is_the_innermost_of_this_package():
    place, stack = _stack_of(sys._getframe())
    assert place == stack.split(" < ")[0] and "test_the_place_is_the_innermost" in place
    assert _stack_of(None)[0] == "?"
