"""`Watchdog`: when a run stands still, it writes down why, in `<output_dir>/stalls/<time>_step<n>/`."""

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

MIN_S, MEDIANS, POLL_S, LOG_LINES = 120.0, 3.0, 0.5, 50
log = logging.getLogger(__name__)


class Watchdog:
    """Looks at the run of this process, rank 0: once `start`ed, in each stall and whenever it is asked.

    Args:
        steps: tells how many are done.
        limit_s: of a step; None: three times the median, two minutes at least.
        ask: `situation` of the controller, within a short deadline; or an AsyncGrpoError.
    """

    def __init__(
        self, folder: Path, steps: Callable[[], int], limit_s: float | None, ask: Callable[[], dict[str, Any]]
    ) -> None:
        self._folder, self._steps, self._limit_s, self._ask = folder, steps, limit_s, ask
        self._step, self._since = steps(), time.monotonic()
        self._asked = threading.Event()
        self.ask = self._asked.set

    def start(self) -> Callable[[], None]:
        """From now on, in a thread of its own: the main one may be in a collective that never ends. Returns `ask`."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self.ask

    def _watch(self) -> None:
        took_s, told = deque([0.0], maxlen=50), False
        while True:
            asked = self._asked.wait(POLL_S)
            self._asked.clear()
            step, age_s = self._steps(), time.monotonic() - self._since
            if step != self._step:
                took_s.append(age_s)
                self._step, self._since, told, age_s = step, time.monotonic(), False, 0.0
            is_stall = not told and age_s > (self._limit_s or max(MIN_S, MEDIANS * statistics.median(took_s)))
            told |= is_stall
            if is_stall or asked:
                try:
                    self.report()
                except Exception:  # it must cost neither the run nor the next report
                    log.exception("the run could not be looked at")

    def report(self) -> None:
        """Look, and write down what is seen."""
        age_s, now = time.monotonic() - self._since, time.strftime("%Y%m%d-%H%M%S")
        seen, folder = self._look(), self._folder / "stalls" / f"{now}_step{self._step}"
        logs = sorted((self._folder / "logs").glob("*.log"))
        why = [diagnose(seen), "", f"Step {self._step} was done {age_s:.0f} s before.", *_details(seen)]
        texts = {  # in this order: who sees the last, sees all
            "stacks": [f"{one}\n{one.stack}" for one in seen.processes if one.stack],
            "logs": ["\n".join([f"== {path.name}", *last_lines(path, LOG_LINES)]) for path in logs],
            "why": why,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, parts in texts.items():
                (folder / "new").write_text("\n".join([*parts, ""]), encoding="utf-8")
                (folder / "new").replace(folder / f"{name}.txt")
        except OSError as error:  # a full disk may be the very cause
            log.error("%s cannot be written (%s):\n%s", folder, error, "\n".join(why))
        log.warning("no step for %.0f s: %s (see %s)", age_s, why[0], folder)

    def _look(self) -> Snapshot:
        own, silence = situation(), ""
        try:
            told = self._ask()
        except AsyncGrpoError as error:
            told, silence = own, str(error)
        roots = {holder(self._folder) or own["pid"], os.getppid() if "RANK" in os.environ else own["pid"]}
        waits = [*told["waits"]]
        if told["pid"] != own["pid"]:
            waits += own["waits"]
            with suppress(psutil.Error):  # of a Ray started by hand, which others may use, too
                roots.add(psutil.Process(told["pid"]).ppid())
        places = str(self._folder), tempfile.gettempdir()
        free_mb = {place: psutil.disk_usage(place).free / 2**20 for place in places}
        return Snapshot(waits, silence, look(roots), free_mb)


def _details(seen: Snapshot) -> list[str]:
    waits = [f"{one.age_s:9.1f} s  {one.who} -> {one.whom} ({one.kind})" for one in seen.waits]
    processes = [f"{one.memory_mb:9.0f} MB  {one}: {' < '.join(one.frames[:3])}" for one in seen.processes]
    free = {"memory": psutil.virtual_memory().available / 2**20, **seen.free_mb}
    disks = [f"{mb:9.0f} MB of {name} are free" for name, mb in free.items()]
    return ["\nWho waits for whom:", *sorted(waits, reverse=True), "\nProcesses:", *processes, *disks]


def stalls_of(folder: Path) -> dict[Path, str]:
    """Return what was written of each stall of a run, the newest first, by its folder."""
    texts: dict[Path, str] = {}
    for path in reversed(files_inside(folder, "stalls/*/why.txt")):
        try:
            texts[path.parent] = read_bytes(path).decode("utf-8", "replace")
        except OSError as error:
            log.warning("%s is not read: %s", path, error.strerror)
    return texts
