"""One process of a run on the real chain is killed or stopped: how long until the next steps, and what is left of it?

    python -m tests.long.chaos                                # every victim, by both signals, at three moments: 40 minutes
    python -m tests.long.chaos --victim core --signal SIGSTOP --moment 1

Two engines, a reference worker, `--engine-stall-s 15`. Moments are a share of a step after the end of one: 0 while
weights are on their way, then in the middle of generation and training; of a worker that joins (the successor of one
that was killed) 0.5, 4 and 8 s after its process is there. `last` is the only engine of its run. Of rank 0 and the
controller the run must end by itself, and the same command go on. Else it must go on within a minute, or 45 s after a
SIGSTOP (`--engine-stall-s` + 30).
"""

import argparse
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import psutil
from real_runs import OPTIONS, left_behind, lines, wait_for_step

VICTIMS = {
    "actor": "ray::GenerationActor",
    "core": "VLLM::EngineCore",
    "logprob": "ray::LogprobActor",
    "verifier": "ray::VerifierActor",
    "joining": "ray::GenerationActor",
    "last": "ray::GenerationActor",
    "rank": "async_grpo.launch.trainer --config",
    "controller": "ray::RunController",
}
ENDS = ("rank", "controller")
SHARES, JOINING_S = (0.0, 0.4, 0.8), (0.5, 4.0, 8.0)
WATCHED_S, MORE_STEPS = 150.0, 6


class Struck:
    """A run, and the blow that it gets."""

    def __init__(self, victim: str, name: str, moment: int, folder: Path) -> None:
        self.victim, self.signal, self.moment, self.folder = victim, getattr(signal, name), moment, folder

    def start(self, console: IO[str]) -> subprocess.Popen[Any]:
        own = {"output-dir": self.folder / "run", "run-name": self.folder.name, "num-training-batches": 1000}
        own |= {"nproc-per-node": 1, "engine-stall-s": 15, "max-generation-tokens": 200}
        own |= {"generation-workers": 1 if self.victim == "last" else 2, "checkpoint-every-s": 2}
        command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
        command += [f"--{option}={value}" for option, value in (OPTIONS | own).items()]
        told: dict[str, Any] = {"env": {**os.environ, "RUN_MARK": str(self.folder)}}
        return subprocess.Popen(command, stdout=console, stderr=subprocess.STDOUT, **told)

    def targets(self, run: subprocess.Popen[Any]) -> list[psutil.Process]:
        found = []
        for one in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += [one] if VICTIMS[self.victim] in " ".join(one.cmdline()) else []
        return found

    def steps(self) -> list[dict[str, Any]]:
        return lines(self.folder / "run")

    def strike(self, run: subprocess.Popen[Any]) -> None:
        """At the moment."""
        known = self.targets(run)
        if self.victim == "joining":
            known[0].send_signal(signal.SIGKILL)
            while not (new := [one for one in self.targets(run) if one not in known]):
                time.sleep(0.1)
            time.sleep(JOINING_S[self.moment])
            new[0].send_signal(self.signal)
            return
        seconds = sorted(line["time_per_batch"] for line in self.steps()[1:])
        before = len(self.steps())
        while len(self.steps()) == before:
            time.sleep(0.005)
        time.sleep(SHARES[self.moment] * seconds[len(seconds) // 2])
        known[-1].send_signal(self.signal)

    def seconds_to_go_on(self, run: subprocess.Popen[Any]) -> float:
        """Until two more steps: one may have been under way. Infinite if the run ends, or stands."""
        before, begun, first_s = len(self.steps()), time.monotonic(), float("inf")
        while (after_s := time.monotonic() - begun) < WATCHED_S and run.poll() is None:
            done = len(self.steps()) - before
            first_s = min(first_s, after_s if done > 1 else float("inf"))
            if done > MORE_STEPS:
                break
            time.sleep(0.1)
        return first_s

    def is_whole(self) -> bool:
        """Every step has its line, all its samples, and every group was trained once."""
        steps, groups = self.steps(), dict[int, set[int]]()
        for sample in lines(self.folder / "run", "samples.jsonl"):
            groups.setdefault(sample["step"], set()).add(sample["group"])
        once = [group for of_step in groups.values() for group in of_step]
        return (
            [line["step"] for line in steps] == list(range(1, len(steps) + 1))
            and all(line["samples_in_batch"] == 64 for line in steps)
            and len(once) == len(set(once)) == 8 * len(groups)
        )


def struck(victim: str, name: str, moment: int, folder: Path) -> str:
    """What was seen, in words."""
    it, console = Struck(victim, name, moment, folder), folder / "console.txt"
    with console.open("w") as out:
        run = it.start(out)
        try:
            wait_for_step(folder / "run", 4, run)
            it.strike(run)
            if victim in ENDS:
                begun = time.monotonic()
                code = run.wait(WATCHED_S)
                said = re.findall(r"^error: .*", console.read_text(), re.MULTILINE)
                seen = (
                    f"ended after {time.monotonic() - begun:.0f} s with {code}: {(said or ['?'])[-1][:110]}"
                )
                before, run = len(it.steps()), it.start(out)
                wait_for_step(folder / "run", before + 3, run)
                seen += "; the same command went on"
            else:
                seen = f"two more steps after {it.seconds_to_go_on(run):.0f} s"
                seen += "" if run.poll() is None else f", the run ENDED with {run.returncode}"
        except (AssertionError, subprocess.TimeoutExpired) as error:
            seen = f"FAILED: {str(error)[-600:]}"
        finally:
            run.send_signal(signal.SIGTERM)
            try:
                run.wait(90)
            except subprocess.TimeoutExpired:
                run.kill()
    left = len(left_behind(folder))
    return (
        f"{victim} {name} moment {moment}: {seen}; every group once: {it.is_whole()}; processes left: {left}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--victim", choices=VICTIMS, action="append")
    parser.add_argument("--signal", choices=["SIGKILL", "SIGSTOP"], action="append")
    parser.add_argument("--moment", type=int, choices=[0, 1, 2], action="append")
    options = parser.parse_args()
    signals, moments = options.signal or ["SIGKILL", "SIGSTOP"], options.moment or [0, 1, 2]
    for victim, name, moment in itertools.product(options.victim or VICTIMS, signals, moments):
        if victim in ENDS and name == "SIGSTOP" and not options.signal:
            continue  # a trainer that is stopped is not dead; it goes on when it is told to
        with tempfile.TemporaryDirectory() as folder:
            print(struck(victim, name, moment, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
