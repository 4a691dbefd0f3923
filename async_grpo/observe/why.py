"""`async-grpo why RUN`: show what a stalled run waits for, or how a run ended."""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from async_grpo.observe.run_view import RunView
from async_grpo.observe.status import headline
from async_grpo.options.fields import Section, required
from async_grpo.processes.look import look, request_look
from async_grpo.processes.untrusted_files import printable

ANSWER_TIMEOUT_S = 60.0  # seconds that a run may take to report what it waits for
POLL_S = 0.2
LOG_LINES = 2000  # lines at the end of each log that are searched for errors
SHOWN_ERRORS = 3  # number of errors at the end of each log that are shown
ERROR = re.compile(r"error: | ERROR |^([a-z_]+\.)*[A-Z]\w+(Error|Exception): ")


@dataclass(frozen=True, kw_only=True)
class WhyConfig(Section):
    """Options of `async-grpo why`."""

    path: str = required("Folder of the run.", "Why", argument=True)


def why(config: WhyConfig) -> None:
    """Print the run's stall reports. For an ended run, also print the last errors in its logs.

    If a live run has reported no stall yet, it is asked to report what it waits for.

    Raises:
        ConfigurationError: The folder contains no run.
    """
    run = RunView(Path(config.path))
    _ = run.options  # raises an error if the folder contains no run
    pid = run.writer_process()
    if pid is None:
        print(headline(run, run.metrics(2)))
        _print_errors(run)
    elif not run.stalls():
        _request_stall(run, pid)
    for number, (folder, text) in enumerate(run.stalls().items()):
        lines = [printable(line) for line in text.splitlines()] or [""]
        if number == 0:  # the newest stall is printed in full
            print("\n".join(lines))
            print(f"Stacks and logs: {folder}")
        else:
            print(f"{folder.name}: {lines[0]}")


def _print_errors(run: RunView) -> None:
    for name, lines in run.log_lines(LOG_LINES, "*").items():
        errors = [printable(line) for line in lines if ERROR.search(line)]
        if errors:
            print("\n".join([name, *errors[-SHOWN_ERRORS:]]))
        else:
            print(f"{name}: no error")


def _request_stall(run: RunView, pid: int) -> None:
    """Ask the run to report what it waits for. If no report appears in time, print the stacks of its processes."""
    # The process id comes from a file. It could belong to an unrelated process, which the signal might end
    is_requested = _holds(pid, run.lock_file) and request_look(pid)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while is_requested and not run.stalls() and run.writer_process() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if not run.stalls():
        print("The run does not answer; it may be starting. Its processes:", *look([pid]), sep="\n")


def _holds(pid: int, lock: Path) -> bool:
    """Return whether a process has the run's lock file open. The main process of a run keeps it open until its end."""
    try:
        lock_status = lock.stat()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # the process has closed this file in the meantime
                if os.path.samestat(descriptor.stat(), lock_status):
                    return True
    except OSError:  # the process has ended, or belongs to another user and cannot get a signal
        return False
    return False
