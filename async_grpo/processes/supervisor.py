"""`Supervisor`: a few programs that live and die together. It knows nothing of what they do."""

import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.errors import EXIT_USAGE, ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.processes.end_on_signal import SIGNALS
from async_grpo.processes.process_tree import adopt_orphans, descendants, die_with, end_descendants

TERM_GRACE_S, KILL_GRACE_S, ECHO_S = 8.0, 5.0, 3.0
TRACEBACK_END = re.compile(r"(\[rank\d+\]: )?([a-z_]+\.)*[A-Z]\w+(Error|Exception): ")
TORCHRUN_RANK = re.compile(r"rank\s*: (\d+)")
TORCHRUN_EXIT = re.compile(r"exitcode\s*: (-?\d+)\s+\(pid: (\d+)\)")

log = logging.getLogger(__name__)


@contextmanager
def handling(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """As long as the block lasts, these signals have `handler` called. Outside of the main thread nothing changes.

    Python lets the main thread alone set handlers, and calls them there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            # None: the handler was not set by Python, which cannot set it again
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@dataclass
class Program:
    """One child and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path

    def describe_exit(self) -> str:
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}"


class Supervisor:
    """Starts programs, watches them, and ends them all. Their output goes to files in `folder`.

    What this process has started before is left alone: a notebook, or a script, may have children of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spared = frozenset(descendants(os.getpid()))
        self._programs: list[Program] = []  # in order of start
        folder.mkdir(parents=True, exist_ok=True)
        adopt_orphans()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], *, console: bool = False
    ) -> Program:
        """Start `command`; its output goes to `<folder>/<name>.log`, with `console` its stderr alone."""
        output = self._folder / f"{name.replace(' ', '-')}.log"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=None if console else sink,
                stderr=sink,
                start_new_session=True,  # a Ctrl-C reaches the supervisor alone, which ends the rest in order
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
            )
        self._programs.append(Program(name, process, output))
        return self._programs[-1]

    def wait_for_text(self, program: Program, text: str, deadline_s: float) -> None:
        """Wait until the program has written `text`. Raises DeadlineExceeded, or as `check` does."""
        give_up = time.monotonic() + deadline_s
        while text not in program.output.read_text(errors="replace"):
            self.check()
            if program.process.poll() is not None or time.monotonic() > give_up:
                where = f"in {deadline_s:.0f} s; see {program.output}"
                raise DeadlineExceeded(f"{program.name} did not say {text!r} {where}")
            time.sleep(0.1)

    def wait(self, main: Program) -> int:
        """Wait for `main` to end, while all others run. Returns its exit code; raises as `check`."""
        while main.process.poll() is None:
            try:
                self.check(except_for=main)
            except (WorkerLost, ConfigurationError):
                if main.process.poll() != 0:  # else the other was late for a run that is over and well
                    raise
            time.sleep(0.2)
        return main.process.returncode

    def wait_all(self, programs: Sequence[Program], deadline_s: float) -> None:
        """Give programs that end by themselves the time to do so."""
        give_up = time.monotonic() + deadline_s
        while any(p.process.poll() is None for p in programs) and time.monotonic() < give_up:
            time.sleep(0.1)

    def check(self, except_for: Program | None = None) -> None:
        """See that no program has died. (One that ends with 0 was told that the run is over.)

        Raises WorkerLost: how it died, its last words; ConfigurationError: it refused its settings.
        """
        if any(program.process.poll() for program in self._programs if program is not except_for):
            time.sleep(ECHO_S)  # the first to be noticed need not be the first to have died
            dead = [program for program in self._programs if program.process.poll()]
            refused = any(program.process.returncode == EXIT_USAGE for program in dead)
            message = "; ".join(f"{program.describe_exit()}{log_excerpt(program)}" for program in dead)
            raise (ConfigurationError if refused else WorkerLost)(message)

    def stop(self) -> None:
        """End the last started program, then the others, then whatever else has come to descend from this process."""
        with handling(signal.SIG_IGN, *SIGNALS):  # a second Ctrl-C must not leave half of it running
            for programs in (self._programs[-1:], self._programs[:-1]):
                for program in programs:
                    program.process.terminate()
                self.wait_all(programs, TERM_GRACE_S)
            try:
                end_descendants(grace_s=KILL_GRACE_S, deadline_s=KILL_GRACE_S, spared=self._spared)
            except TimeoutError as error:  # the rest of the end must still be done
                log.error("%s", error)
            adopt_orphans(False)  # of processes that are started after this, others collect them


def log_excerpt(program: Program) -> str:
    """The end of a program's output, for an error message."""
    whole = program.output.read_text(errors="replace").strip()
    text = whole.splitlines()
    errors = [line for line in text if line.startswith("error: ")]
    errors = errors or [one for one in text if TRACEBACK_END.match(one) and "ChildFailedError" not in one]
    if root := torchrun_root(whole):
        errors.append(root)
    excerpt = "".join(f"\n    | {line}" for line in (errors[-2:] or text[-12:]))
    return f"{excerpt}\n    (all of it: {program.output})"


def torchrun_root(output: str) -> str:
    """Return what torchrun says of the rank that ended first, or "".

    One expression for all of it would take time in proportion to the cube of a log's length.
    """
    after = output.partition("Root Cause")[2]
    rank = TORCHRUN_RANK.search(after)
    end = TORCHRUN_EXIT.search(after, rank.end()) if rank else None
    if rank is None or end is None:
        return ""
    return f"rank {rank[1]} (pid {end[2]}) was the first to end, with exit code {end[1]}"
