"""`Watchdog`: if a run makes no progress, it writes a report to `<output_dir>/stalls/<time>_step<n>/`."""

import logging
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from async_grpo.errors import AsyncGrpoError
from async_grpo.metrics.diagnosis import Snapshot, diagnose
from async_grpo.metrics.tail import last_lines
from async_grpo.metrics.writer import holder
from async_grpo.processes.look import look
from async_grpo.processes.untrusted_files import files_inside, read_bytes
from async_grpo.processes.waits import situation

# If --stall-s is not set, a stall is a time without a finished step of at least MIN_S seconds, and of at least MEDIANS
# times the median duration of a step
MIN_S = 120.0
MEDIANS = 3.0
POLL_S = 0.5
STEPS_OF_MEDIAN = 50
LOG_LINES = 50  # number of last lines of each log in a report
log = logging.getLogger(__name__)


class Watchdog:
    """Runs in rank 0, and writes a report about the run in each stall and on request.

    Args:
        folder: The run's folder.
        steps: Returns the number of steps done.
        limit_s: Seconds without a finished step that count as a stall. None means three times the median duration of a
            step, but at least two minutes.
        ask: Returns the controller's `situation` within a few seconds, or raises an AsyncGrpoError.
    """

    def __init__(
        self, folder: Path, steps: Callable[[], int], limit_s: float | None, ask: Callable[[], dict[str, Any]]
    ) -> None:
        self._folder = folder
        self._steps = steps
        self._limit_s = limit_s
        self._controller_situation = ask
        self._step = steps()
        self._step_done_at = time.monotonic()
        self._is_requested = threading.Event()
        self.ask = self._is_requested.set

    def start(self) -> Callable[[], None]:
        """Start watching in a thread, and return a function that requests a report.

        The main thread cannot watch, because it may be stuck in a collective.
        """
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self.ask

    def _watch(self) -> None:
        step_seconds = deque([0.0], maxlen=STEPS_OF_MEDIAN)
        is_reported = False  # whether the current stall has been reported
        while True:
            is_requested = self._is_requested.wait(POLL_S)
            self._is_requested.clear()
            step = self._steps()
            age_s = time.monotonic() - self._step_done_at
            if step != self._step:
                step_seconds.append(age_s)
                self._step = step
                self._step_done_at = time.monotonic()
                is_reported = False
                age_s = 0.0
            limit_s = self._limit_s or max(MIN_S, MEDIANS * statistics.median(step_seconds))
            is_new_stall = not is_reported and age_s > limit_s
            if is_new_stall:
                is_reported = True
            if is_new_stall or is_requested:
                try:
                    self.report()
                except Exception:
                    # A failing report must end neither the run nor this thread
                    log.exception("the report about the run failed")

    def report(self) -> None:
        """Inspect the run, and write a report."""
        age_s = time.monotonic() - self._step_done_at
        now = time.strftime("%Y%m%d-%H%M%S")
        snapshot = self._look()
        folder = self._folder / "stalls" / f"{now}_step{self._step}"
        diagnosis = diagnose(snapshot)
        log_parts = []
        for path in sorted((self._folder / "logs").glob("*.log")):
            log_parts.append("\n".join([f"== {path.name}", *last_lines(path, LOG_LINES)]))
        parts_by_file = {
            "stacks": [f"{process}\n{process.stack}" for process in snapshot.processes if process.stack],
            "logs": log_parts,
            # This file is written last, so that the other files are complete once it exists
            "why": [diagnosis, "", f"Step {self._step} was done {age_s:.0f} s before.", *_details(snapshot)],
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, parts in parts_by_file.items():
                (folder / "new").write_text("\n".join([*parts, ""]), encoding="utf-8")
                (folder / "new").replace(folder / f"{name}.txt")
        except OSError as error:
            # The cause of the stall may be a full disk, so the report is also logged
            log.error("%s cannot be written (%s):\n%s", folder, error, "\n".join(parts_by_file["why"]))
        log.warning("no step for %.0f s: %s (see %s)", age_s, diagnosis, folder)

    def _look(self) -> Snapshot:
        """Collect the state of the run: its waits, processes and disks."""
        rank_situation = situation()
        silence = ""
        try:
            controller_situation = self._controller_situation()
        except AsyncGrpoError as error:
            controller_situation = rank_situation
            silence = str(error)
        own_pid = rank_situation["pid"]
        # The processes whose descendants belong to the run: the one that started the run, and torchrun
        roots = {holder(self._folder) or own_pid, os.getppid() if "RANK" in os.environ else own_pid}
        waits = [*controller_situation["waits"]]
        if controller_situation["pid"] != own_pid:
            waits += rank_situation["waits"]
            # If Ray was started by hand, its processes are not descendants of the other roots
            with suppress(psutil.Error):
                roots.add(psutil.Process(controller_situation["pid"]).ppid())
        free_mb = {}
        for place in (str(self._folder), tempfile.gettempdir()):
            free_mb[place] = psutil.disk_usage(place).free / 2**20
        return Snapshot(waits, silence, look(roots), free_mb)


def _details(snapshot: Snapshot) -> list[str]:
    """Return the lines of a report that list all waits, processes and disks."""
    waits = [f"{wait.age_s:9.1f} s  {wait.who} -> {wait.whom} ({wait.kind})" for wait in snapshot.waits]
    processes = []
    for process in snapshot.processes:
        frames = " < ".join(process.frames[:3])
        processes.append(f"{process.memory_mb:9.0f} MB  {process}: {frames}")
    free_mb = {"memory": psutil.virtual_memory().available / 2**20, **snapshot.free_mb}
    disks = [f"{mb:9.0f} MB of {name} are free" for name, mb in free_mb.items()]
    return [
        "\nWho waits for whom:",
        *sorted(waits, reverse=True),
        "\nProcesses:",
        *processes,
        *disks,
    ]


def stalls_of(folder: Path) -> dict[Path, str]:
    """Return the text of each stall report of a run, by the report's folder, the newest first."""
    texts: dict[Path, str] = {}
    for path in reversed(files_inside(folder, "stalls/*/why.txt")):
        try:
            texts[path.parent] = read_bytes(path).decode("utf-8", "replace")
        except OSError as error:
            log.warning("%s is not read: %s", path, error.strerror)
    return texts
