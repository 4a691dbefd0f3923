"""`async-grpo why RUN`: who holds up a run, or how it ended."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from async_grpo.metrics.tail import last_lines, last_records
from async_grpo.metrics.watchdog import stalls_of
from async_grpo.metrics.writer import METRICS_FILE, holder, options_of
from async_grpo.options.fields import Section, required
from async_grpo.processes.look import ask, look
from async_grpo.programs.status import headline

ANSWER_S, LOG_LINES, ERRORS = 60.0, 2000, 3
ERROR = re.compile(r"error: | ERROR |^([a-z_]+\.)*[A-Z]\w+(Error|Exception): ")


@dataclass(frozen=True, kw_only=True)
class WhyConfig(Section):
    """Which run."""

    path: str = required("The run's folder.", "Why", argument=True)


def why(config: WhyConfig) -> None:
    """Print it. A run that lives and was never looked at is, now. ConfigurationError: the folder holds no run."""
    folder = Path(config.path)
    options = options_of(folder)
    if (pid := holder(folder)) is None:
        print(headline(folder, options, last_records(folder / METRICS_FILE, 2)))
        for path in sorted((folder / "logs").glob("*.log")):
            errors = [line for line in last_lines(path, LOG_LINES) if ERROR.search(line)]
            print("\n".join([path.name, *errors[-ERRORS:]]) if errors else f"{path.name}: no error")
    elif not stalls_of(folder):
        give_up, asked = time.monotonic() + ANSWER_S, ask(pid)
        while asked and not stalls_of(folder) and holder(folder) and time.monotonic() < give_up:
            time.sleep(0.2)
        if not stalls_of(folder):
            print("The run does not answer; it may be starting. Its processes:", *look([pid]), sep="\n")
    for number, (place, text) in enumerate(stalls_of(folder).items()):
        print(f"{text}\nStacks and logs: {place}" if number == 0 else f"{place.name}: {text.splitlines()[0]}")
