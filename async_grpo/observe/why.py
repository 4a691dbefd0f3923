"""`async-grpo why RUN`: who holds up a run, or how it ended."""

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

ANSWER_S, LOG_LINES, ERRORS = 60.0, 2000, 3
ERROR = re.compile(r"error: | ERROR |^([a-z_]+\.)*[A-Z]\w+(Error|Exception): ")


@dataclass(frozen=True, kw_only=True)
class WhyConfig(Section):
    """Which run."""

    path: str = required("The run's folder.", "Why", argument=True)


def why(config: WhyConfig) -> None:
    """Print it. A run that lives and was never looked at is, now. ConfigurationError: the folder holds no run."""
    run = RunView(Path(config.path))
    _ = run.options  # or it is refused here: the folder holds no run
    if (pid := run.writer_process()) is None:
        print(headline(run, run.metrics(2)))
        for name, lines in run.log_lines(LOG_LINES, "*").items():
            errors = [printable(line) for line in lines if ERROR.search(line)]
            print("\n".join([name, *errors[-ERRORS:]]) if errors else f"{name}: no error")
    elif not run.stalls():
        # A number in a file could be that of any process, which a signal may disturb
        asked = _holds(pid, run.lock_file) and request_look(pid)
        give_up = time.monotonic() + ANSWER_S
        while asked and not run.stalls() and run.writer_process() and time.monotonic() < give_up:
            time.sleep(0.2)
        if not run.stalls():
            print("The run does not answer; it may be starting. Its processes:", *look([pid]), sep="\n")
    for number, (place, text) in enumerate(run.stalls().items()):
        lines = [printable(line) for line in text.splitlines()] or [""]
        shown = (
            "\n".join([*lines, f"Stacks and logs: {place}"]) if number == 0 else f"{place.name}: {lines[0]}"
        )
        print(shown)


def _holds(pid: int, lock: Path) -> bool:
    """Return whether a process has the run's lock open, as a run has it until its end."""
    try:
        wanted = lock.stat()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it has been closed
                if os.path.samestat(descriptor.stat(), wanted):
                    return True
    except OSError:  # it has ended, or is another user's, whom no signal reaches
        return False
    return False
