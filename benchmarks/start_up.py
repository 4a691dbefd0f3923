"""Measure the time from the command to the first optimizer step: the start of each process, and its CPU seconds until then.

    python benchmarks/start_up.py [--output-dir FOLDER] [options of `async-grpo demo`]

It reads /proc five times a second. It does not count what a process uses after the last reading, and processes that
live shorter than 0.2 s. CPU seconds hardly depend on other programs on the machine; seconds of the clock do.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from async_grpo.metrics.writer import METRICS_FILE
from async_grpo.processes.process_tree import descendants

ROOT = Path(__file__).resolve().parent.parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
KINDS = {  # kind of a process by its command line: the first pattern that matches decides
    "trainer rank": r"async_grpo\.launch\.trainer(?!.*torch\.distributed)",
    "torchrun": r"torch\.distributed\.run|torchrun",
    "dispatcher": r"async_grpo\.launch\.worker",
    "launcher": r"-m async_grpo ",
    "engine core": r"VLLM::Engine",
    "vLLM worker": r"VLLM::Worker",
    "reward process": r"adapter_process|reward process|_child",
    "Ray": r"raylet|gcs_server|ray\.scripts|dashboard|log_monitor|monitor\.py|runtime_env|ray start",
    "warm server": r"processes\.warm_server",
    "client of a warm server": r"processes/warm_client",
    "Ray worker, unused": r"ray::IDLE|default_worker",
}


@dataclass
class Seen:
    """One process at the last reading. Times are in seconds since the command."""

    kind: str
    started_s: float
    cpu_s: float
    ended_s: float | None = None


def kind_of(command: str) -> str:
    """Return the kind of a process. For an actor, return the name that Ray gives it.

    >>> kind_of("ray::GenerationActor.start")
    'GenerationActor'
    """
    if (actor := re.match(r"ray::(\w+?)(\.|$)", command)) and actor[1] != "IDLE":
        return actor[1]
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, command)), command[:60])


class Watch:
    """Watches all descendants of this process."""

    def __init__(self) -> None:
        self.begun = time.time()
        self.seen: dict[int, Seen] = {}
        with open("/proc/stat") as file:
            self._boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))

    def look(self) -> None:
        now, alive = time.time() - self.begun, set(descendants(os.getpid()))
        for pid in alive:
            try:
                command = (
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # the process has just ended
                continue
            cpu_s, born = (int(fields[11]) + int(fields[12])) * TICK_S, int(fields[19]) * TICK_S
            if command:
                seen = self.seen.setdefault(pid, Seen("", 0.0, 0.0))
                seen.kind, seen.cpu_s = kind_of(command.strip()), cpu_s
                seen.started_s = seen.started_s or max(0.01, self._boot + born - self.begun)
        for pid in self.seen.keys() - alive:
            self.seen[pid].ended_s = self.seen[pid].ended_s or now


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", default=None)
    own, options = parser.parse_known_args()
    folder = Path(own.output_dir or tempfile.mkdtemp(prefix="start-up-")) / "run"
    watch, marks = Watch(), dict[str, float]()
    said = subprocess.Popen(
        [sys.executable, "-m", "async_grpo", "demo", f"--output-dir={folder}", "--steps=1", *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    at_first_step: dict[int, float] = {}
    while said.poll() is None:
        watch.look()
        metrics = folder / METRICS_FILE
        if "first step" not in marks and metrics.exists() and metrics.stat().st_size:
            marks["first step"] = time.time() - watch.begun
            at_first_step = {pid: seen.cpu_s for pid, seen in watch.seen.items()}
        time.sleep(0.2)
    marks["end"] = time.time() - watch.begun
    if said.returncode:
        raise SystemExit(f"the run ended with exit code {said.returncode}: see {folder / 'logs'}")
    print("started at (s)  CPU to the first step (s)  in all (s)  ended at (s)")
    for pid, seen in sorted(watch.seen.items(), key=lambda item: item[1].started_s):
        end = f"{seen.ended_s:8.1f}" if seen.ended_s else "        "
        print(
            f"{seen.started_s:8.1f} {at_first_step.get(pid, 0.0):10.2f} {seen.cpu_s:10.2f} {end}  {seen.kind}"
        )
    kinds = Counter[str]()
    for pid, cpu_s in at_first_step.items():
        kinds[watch.seen[pid].kind] += cpu_s  # type: ignore[assignment]  # seconds, not a number of them
    for kind, cpu_s in kinds.most_common():
        print(f"{cpu_s:8.2f} s of CPU to the first step: {kind}")
    print(json.dumps({**marks, "cpu_to_first_step_s": sum(at_first_step.values())}))


if __name__ == "__main__":
    main()
