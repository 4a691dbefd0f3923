"""`Supervisor`: runs several programs together, and ends all of them when one fails."""

import logging
import os
import re
import signal
import socket
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

TERM_GRACE_S = 8.0  # seconds that programs have to end after SIGTERM
KILL_GRACE_S = 5.0  # seconds that remaining descendants have to end after SIGTERM, and again after SIGKILL
ECHO_S = 3.0  # seconds to wait after a program has failed, because others may fail from the same cause
MAX_ERRORS_SHOWN = 2
MAX_LINES_SHOWN = 12
TRACEBACK_END = re.compile(r"(\[rank\d+\]: )?([a-z_]+\.)*[A-Z]\w+(Error|Exception): ")
TORCHRUN_RANK = re.compile(r"rank\s*: (\d+)")
TORCHRUN_EXIT = re.compile(r"exitcode\s*: (-?\d+)\s+\(pid: (\d+)\)")

log = logging.getLogger(__name__)


@contextmanager
def handling(handler: Any, *signals: signal.Signals) -> Iterator[None]:
    """During the block, use a handler for these signals. Outside of the main thread, do nothing.

    Python allows only the main thread to set handlers, and calls all handlers in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous_handler in previous_handlers.items():
            # None means that the previous handler was not set by Python and cannot be set again, so use the default
            signal.signal(number, signal.SIG_DFL if previous_handler is None else previous_handler)


@dataclass
class Program:
    """A program that the supervisor has started."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path  # file with the program's output

    def describe_exit(self) -> str:
        """Return a text that says how the program has ended."""
        code = self.process.returncode
        if code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"


class Supervisor:
    """Starts programs, watches them, and ends all of them.

    Child processes that existed before the supervisor are never ended, because a notebook or script may have started
    them for other purposes.

    Args:
        folder: Folder for the files with the programs' output.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spared = frozenset(descendants(os.getpid()))
        self._programs: list[Program] = []  # programs in the order in which they were started
        folder.mkdir(parents=True, exist_ok=True)
        adopt_orphans()

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        console: bool = False,
        inherited: Sequence[socket.socket] = (),
    ) -> Program:
        """Start a program.

        Args:
            name: Name of the program. Its output goes to `<folder>/<name>.log`, with dashes instead of spaces.
            command: The program and its arguments.
            environment: The program's environment variables.
            console: Whether the program prints to this process's stdout. Then only its stderr goes to the file.
            inherited: Sockets that the program inherits, under the same descriptor numbers.
        """
        output = self._folder / f"{name.replace(' ', '-')}.log"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=None if console else sink,
                stderr=sink,
                # Start a new session. Ctrl-C then reaches only the supervisor, which ends the programs in order
                start_new_session=True,
                pass_fds=[listener.fileno() for listener in inherited],
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),
            )
        program = Program(name, process, output)
        self._programs.append(program)
        return program

    def move_outputs(self, folder: Path) -> None:
        """Use another folder for the output of all programs that are started from now on.

        The programs that are already running continue to write to their files in the old folder. The new folder gets links
        to these files, which `stop` replaces by copies.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        for program in self._programs:
            link = folder / program.output.name
            link.unlink(missing_ok=True)
            link.symlink_to(program.output)
            program.output = link

    def wait_for_text(self, program: Program, text: str, deadline_s: float) -> None:
        """Wait until a program has written a text to its output file.

        Raises:
            DeadlineExceeded: The program ended, or did not write the text in time.
            WorkerLost: See `check`.
            ConfigurationError: See `check`.
        """
        deadline = time.monotonic() + deadline_s
        while text not in program.output.read_text(errors="replace"):
            self.check()
            if program.process.poll() is not None or time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{program.name} did not say {text!r} in {deadline_s:.0f} s; see {program.output}"
                )
            time.sleep(0.1)

    def wait(self, main: Program) -> int:
        """Wait until the main program ends, and return its exit code. If another program fails first, raise an error.

        Raises:
            WorkerLost: See `check`.
            ConfigurationError: See `check`.
        """
        while main.process.poll() is None:
            try:
                self.check(except_for=main)
            except (WorkerLost, ConfigurationError):
                # If the main program has ended with success, the run is over, and a failure of another program does not
                # matter
                if main.process.poll() != 0:
                    raise
            time.sleep(0.2)
        return main.process.returncode

    def wait_all(self, programs: Sequence[Program], deadline_s: float) -> None:
        """Wait until all programs have ended by themselves, for at most `deadline_s` seconds."""
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if all(program.process.poll() is not None for program in programs):
                return
            time.sleep(0.1)

    def check(self, except_for: Program | None = None) -> None:
        """Check that no program has failed. Exit code 0 is no failure: the program was told that the run is over.

        Args:
            except_for: A program that is not checked.

        Raises:
            WorkerLost: A program failed. The message contains the errors in its output, or the end of the output.
            ConfigurationError: A program refused its settings.
        """
        has_died = any(program.process.poll() for program in self._programs if program is not except_for)
        if not has_died:
            return
        # Wait for other failures from the same cause. The one that was noticed first may not be the first that happened
        time.sleep(ECHO_S)
        dead_programs = [program for program in self._programs if program.process.poll()]
        message = "; ".join(f"{program.describe_exit()}{log_excerpt(program)}" for program in dead_programs)
        if any(program.process.returncode == EXIT_USAGE for program in dead_programs):
            raise ConfigurationError(message)
        raise WorkerLost(message)

    def stop(self, at_once: bool = False) -> None:
        """End the program that was started last, then the others, and then all other descendants of this process.

        Args:
            at_once: Whether to kill them without a grace period, because they have nothing to save.
        """
        # Ignore further signals: after a second Ctrl-C, programs would be left running
        with handling(signal.SIG_IGN, *SIGNALS):
            if not at_once:
                for programs in (self._programs[-1:], self._programs[:-1]):
                    for program in programs:
                        program.process.terminate()
                    self.wait_all(programs, TERM_GRACE_S)
            try:
                end_descendants(
                    grace_s=0.0 if at_once else KILL_GRACE_S, deadline_s=KILL_GRACE_S, spared=self._spared
                )
            except TimeoutError as error:
                # Do not raise, because the caller still has other work to do at the end
                log.error("%s", error)
            self._replace_links()
            # From now on, init adopts orphans again
            adopt_orphans(False)

    def _replace_links(self) -> None:
        """Replace each link that `move_outputs` made with a copy of its file, because the old folder is temporary."""
        for program in self._programs:
            if program.output.is_symlink():
                content = program.output.read_bytes()
                program.output.unlink()
                program.output.write_bytes(content)


def log_excerpt(program: Program) -> str:
    """Return the errors in a program's output, or the end of the output if there are none, for an error message."""
    output = program.output.read_text(errors="replace").strip()
    lines = output.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if not errors:
        # Skip torchrun's own error (ChildFailedError), because the rank's error says more
        errors = [line for line in lines if TRACEBACK_END.match(line) and "ChildFailedError" not in line]
    root = torchrun_root(output)
    if root:
        errors.append(root)
    shown_lines = errors[-MAX_ERRORS_SHOWN:] or lines[-MAX_LINES_SHOWN:]
    excerpt = "".join(f"\n    | {line}" for line in shown_lines)
    return f"{excerpt}\n    (all of it: {program.output})"


def torchrun_root(output: str) -> str:
    """Return a text about the rank that ended first, according to torchrun's report; "" if there is no report.

    The report is searched in several steps. A single regular expression would take cubic time in the length of the log.
    """
    after = output.partition("Root Cause")[2]
    rank = TORCHRUN_RANK.search(after)
    end = TORCHRUN_EXIT.search(after, rank.end()) if rank else None
    if rank is None or end is None:
        return ""
    return f"rank {rank[1]} (pid {end[2]}) was the first to end, with exit code {end[1]}"
