"""`LoopWatch`: logs which code blocks an event loop for longer than a second.

While one callback runs, the event loop does nothing else: no request is answered, and no deadline is kept. Code in the
loop cannot report this. Therefore the loop sets a heartbeat four times a second, and a thread checks it. If a turn of
the loop is late, the thread logs what the loop's thread is doing. The heartbeat and this thread together take less than
0.1 % of a processor.

Two kinds of delay are not the code's fault, and are subtracted. First, the loop's thread may be ready to run but get no
processor, which Linux reports in `schedstat`. Second, the whole process may be stopped (SIGSTOP, a frozen container).
The watching thread detects this by its own delay while no thread of the process computes.
"""

import asyncio
import logging
import math
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

BEAT_S = 0.25  # seconds between heartbeats
LIMIT_S = 1.0  # a turn of the event loop is logged if code delays it by more than this number of seconds
FRAMES = 6  # number of stack frames in the log
# Seconds in which a line of code is not logged again after its first log line. They double with each further log line
# about it
FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0
UNKNOWN_PLACE = "a call that kept Python's lock and has returned since, so that its place is not known"
PACKAGE = str(Path(__file__).resolve().parents[1])

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LateTurn:
    """A turn of the event loop that lasts long or could not begin. All times are in seconds."""

    age_s: float  # time since the heartbeat was due
    computing_s: float  # time in which the loop's thread ran on a processor
    starved_s: float  # time in which the loop's thread was ready to run but got no processor
    stopped_s: float  # time in which the whole process was stopped
    busiest: str = ""  # name of the other thread that used the most CPU time meanwhile
    busiest_s: float = 0.0  # CPU time of that thread

    @property
    def blamed_s(self) -> float:
        """Return the part of the delay that code caused. It is at least the time in which the loop's thread ran."""
        rest_s = self.age_s - self.starved_s - self.stopped_s
        # `rest_s` may be too small: on a busy machine, time passes between reading one clock and the next
        return max(rest_s, min(self.computing_s, self.age_s))

    @property
    def cause(self) -> str:
        """Return a text that says what the loop's thread was doing."""
        if self.computing_s >= self.blamed_s / 2:
            return "it computes"
        if self.busiest_s >= self.blamed_s / 2:
            return f"the thread {self.busiest} computes and keeps Python's lock"
        return "it waits in a call that blocks"


@dataclass
class _Places:
    """Limits how often each line of code (a place) is logged."""

    # Place -> (monotonic time from which it may be logged again, pause after that)
    next_at: dict[str, tuple[float, float]] = field(default_factory=dict)

    def may_log(self, place: str) -> bool:
        """Return whether a place may be logged now.

        If so, begin its next pause, which is twice as long as the one before.
        """
        now = time.monotonic()
        at, pause_s = self.next_at.get(place, (now, FIRST_PAUSE_S))
        if now < at:
            return False
        self.next_at[place] = now + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
        return True


class LoopWatch:
    """Watches the event loop in which `start` is called, until `stop` is called."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._places = _Places()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._longest_s = 0.0
        self._reported_beats = -1  # value of `_beats` in the last turn that was reported
        # For the watching thread: (total delay of all its waits so far, time at which its current wait should end).
        # They are one tuple, so that the loop's thread reads two values that belong together
        self._watcher_delay = (0.0, math.inf)

    def start(self) -> None:
        """Begin to watch. Must be called in the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._beats = 0
        # Values of clocks and counters at the last heartbeat
        self._starved_at_beat_s = self._starved_s()
        self._delay_at_beat_s = 0.0
        self._cpu_at_beat_s = time.process_time()
        self._thread_cpu_at_beat_s = time.thread_time()
        self._due_at = time.monotonic()  # time at which the next heartbeat is due
        self._beat()
        self._watcher = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        """End the watch. A second call does nothing."""
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()

    def take_longest_s(self) -> float:
        """Return the largest `LateTurn.blamed_s` of all turns since the last call."""
        longest_s = self._longest_s
        self._longest_s = 0.0
        return longest_s

    def _beat(self) -> None:
        now = time.monotonic()
        starved_s = self._starved_s()
        cpu_s = time.process_time()
        thread_cpu_s = time.thread_time()
        delay_s = self._watcher_delay_s(now)
        starved_in_turn_s = starved_s - self._starved_at_beat_s
        turn = LateTurn(
            age_s=now - self._due_at,
            computing_s=thread_cpu_s - self._thread_cpu_at_beat_s,
            starved_s=starved_in_turn_s,
            stopped_s=_stopped_s(
                delay_s - self._delay_at_beat_s,
                cpu_s - self._cpu_at_beat_s,
                starved_in_turn_s,
            ),
        )
        self._longest_s = max(self._longest_s, turn.blamed_s)
        if turn.blamed_s > self._limit_s and self._reported_beats != self._beats:
            # The watching thread has not reported this turn: it could not get Python's lock while the turn lasted
            self._log_turn(turn, UNKNOWN_PLACE, UNKNOWN_PLACE)
        self._starved_at_beat_s = starved_s
        self._delay_at_beat_s = delay_s
        self._cpu_at_beat_s = cpu_s
        self._thread_cpu_at_beat_s = thread_cpu_s
        self._due_at = now + BEAT_S
        self._beats += 1
        if not self._ended.is_set():
            self._timer = self._loop.call_later(BEAT_S, self._beat)

    def _watcher_delay_s(self, now: float) -> float:
        """Return the total delay of the watching thread, in its past waits and in its current wait."""
        ended_waits_s, due_at = self._watcher_delay
        return ended_waits_s + max(0.0, now - due_at)

    def _watch(self) -> None:
        """Check the heartbeat, and log late turns. Runs in a thread."""
        beats = -1
        own_delay_s = 0.0
        threads_at_beat = _thread_times()
        cpu_at_beat_s = time.process_time()
        while True:
            before = time.monotonic()
            self._watcher_delay = (self._watcher_delay_s(before), before + BEAT_S)
            if self._ended.wait(BEAT_S):
                return
            has_new_turn = self._beats != beats
            if has_new_turn:
                beats = self._beats
                own_delay_s = 0.0
                # The CPU times at the start of the turn. For the loop's thread and for the process, the heartbeat has read
                # them there. If they were read here, after the turn has begun, they could already include the time of a
                # call that kept Python's lock
                threads_at_beat = _thread_times() | {self._thread_id: self._thread_cpu_at_beat_s}
                cpu_at_beat_s = self._cpu_at_beat_s
                # The watching thread's wait may have begun before the turn, so count only its delay within the turn
                before = max(before, self._due_at - BEAT_S)
            own_delay_s += max(0.0, time.monotonic() - before - BEAT_S)
            age_s = time.monotonic() - self._due_at
            if age_s > self._limit_s and self._beats == beats:
                computed_s = time.process_time() - cpu_at_beat_s
                self._report(self._late_turn(age_s, own_delay_s, threads_at_beat, computed_s))

    def _late_turn(
        self, age_s: float, own_delay_s: float, threads_at_beat: dict[int, float], computed_s: float
    ) -> LateTurn:
        used_s = {
            thread_id: cpu_s - threads_at_beat.get(thread_id, 0.0)
            for thread_id, cpu_s in _thread_times().items()
        }
        computing_s = used_s.pop(self._thread_id, 0.0)
        busiest = max(used_s, key=lambda thread_id: used_s[thread_id], default=None)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        starved_s = self._starved_s() - self._starved_at_beat_s
        return LateTurn(
            age_s,
            computing_s=computing_s,
            starved_s=starved_s,
            stopped_s=_stopped_s(own_delay_s, computed_s, starved_s),
            busiest=names.get(busiest) or "?",
            busiest_s=0.0 if busiest is None else used_s[busiest],
        )

    def _report(self, turn: LateTurn) -> None:
        if turn.blamed_s > self._limit_s:
            self._reported_beats = self._beats
            place, stack = _stack_of(sys._current_frames().get(self._thread_id))
            self._log_turn(turn, place, stack)
        elif turn.starved_s > self._limit_s and self._places.may_log("starved"):
            log.warning(
                "the event loop was ready for %.1f s and got no processor: this machine is overloaded",
                turn.starved_s,
            )

    def _log_turn(self, turn: LateTurn, place: str, stack: str) -> None:
        if self._places.may_log(place):
            log.warning(
                "one turn of the event loop has lasted %.1f s, in which nobody else is served: %s: %s",
                turn.blamed_s,
                turn.cause,
                stack,
            )

    def _starved_s(self) -> float:
        """Return the total time for which the loop's thread was ready but got no processor; 0 if it is not known."""
        try:
            text = Path(f"/proc/self/task/{self._native_id}/schedstat").read_text()
            return int(text.split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0


def _stopped_s(watcher_delay_s: float, computed_s: float, starved_s: float) -> float:
    """Return the seconds for which the whole process was stopped, derived from the delay of the watching thread.

    If another thread computes, the watching thread may be late because it waits for Python's lock. This time does not
    count.
    """
    return max(0.0, watcher_delay_s - computed_s - starved_s)


def _thread_times() -> dict[int, float]:
    """Return the CPU seconds that each Python thread has used, by thread id."""
    times = {}
    for thread in threading.enumerate():
        if thread.ident is not None and Path(f"/proc/self/task/{thread.native_id}").exists():
            try:
                times[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except OSError:  # the thread has ended in the meantime
                continue
    return times


def _stack_of(frame: FrameType | None) -> tuple[str, str]:
    """Return (place to log, stack with the innermost frame first). The place is the innermost frame in this package.

    If a call keeps Python's lock, the watching thread runs only after the call has returned. The loop may then already
    be waiting for its next turn. In this case the place is unknown, and no other code is named.
    """
    if frame is None:
        return "?", "?"
    if _is_between_turns(frame):
        return UNKNOWN_PLACE, UNKNOWN_PLACE
    entries = list[str]()
    place = ""
    while frame is not None:
        code = frame.f_code
        entry = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        if not place and code.co_filename.startswith(PACKAGE):
            place = entry
        entries.append(entry)
        frame = frame.f_back
    return place or entries[0], " < ".join(entries[:FRAMES])


def _is_between_turns(frame: FrameType) -> bool:
    """Return whether an event loop's thread is waiting for its next turn or is in the heartbeat, given its frame."""
    codes = list[CodeType]()
    outer: FrameType | None = frame
    while outer is not None:
        codes.append(outer.f_code)
        outer = outer.f_back
    if any(code is LoopWatch._beat.__code__ for code in codes):
        return True
    names = [code.co_name for code in codes]
    # The loop runs callbacks in `Handle._run`. If the stack does not contain it, no callback is running
    return "_run_once" in names and "_run" not in names[: names.index("_run_once")]
