"""One process of a run on the real chain is killed or stopped: how long until the next steps, and what is left of it?

    python -m benchmarks.chaos                                # all victims, some 15 minutes
    python -m benchmarks.chaos --victim core --signal SIGSTOP --engines 1

The run has `--engine-stall-s 10`. It must go on within a minute, train every group once, and leave no process behind.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "real"), str(ROOT / "tests" / "helpers")]
VICTIMS = {"actor": "ray::GenerationActor", "core": "VLLM::EngineCore", "verifier": "ray::VerifierActor"}
WATCHED_S, MORE_STEPS = 150.0, 12


def strike(victim: str, name: str, engines: int, folder: Path) -> str:
    """What was seen, in words."""
    from test_resume_real import lines, wait_for_step
    from test_whole_chain import OPTIONS, left_behind

    own = {"output-dir": folder / "run", "run-name": folder.name, "num-training-batches": 1000, "kl-coef": 0}
    more = {
        "nproc-per-node": 1,
        "engine-stall-s": 10,
        "generation-workers": engines,
        "max-generation-tokens": 200,
    }
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
    command += [f"--{option}={value}" for option, value in (OPTIONS | own | more).items()]
    with (folder / "console.txt").open("w") as console:
        told = {
            "stdout": console,
            "stderr": subprocess.STDOUT,
            "env": {**os.environ, "RUN_MARK": str(folder)},
        }
        run = subprocess.Popen(command, **told)
    try:
        wait_for_step(folder / "run", 3, run)
        family = psutil.Process(run.pid).children(recursive=True)
        target = next(one for one in family if VICTIMS[victim] in " ".join(one.cmdline()))
        before, begun, first_s = len(lines(folder / "run")), time.monotonic(), float("inf")
        target.send_signal(getattr(signal, name))
        while (after_s := time.monotonic() - begun) < WATCHED_S and run.poll() is None:
            done = len(lines(folder / "run")) - before
            first_s = min(first_s, after_s if done > 1 else float("inf"))  # one may have been under way
            if done > MORE_STEPS:
                break
            time.sleep(0.2)
        ended = "" if run.poll() is None else f", the run ENDED with {run.returncode}"
    finally:
        run.send_signal(signal.SIGTERM)
        try:
            run.wait(90)
        except subprocess.TimeoutExpired:
            run.kill()
    steps = lines(folder / "run")
    whole = [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    whole &= all(line["samples_in_batch"] == 64 for line in steps)
    return (
        f"{name} of {victim}, {engines} engines: two more steps after {first_s:.0f} s{ended}; steps whole and in order: "
        f"{whole}; processes left: {len(left_behind(folder))}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--victim", choices=VICTIMS, action="append")
    parser.add_argument("--signal", choices=["SIGKILL", "SIGSTOP"], action="append")
    parser.add_argument("--engines", type=int, choices=[1, 2], action="append")
    options = parser.parse_args()
    signals, engines = options.signal or ["SIGKILL", "SIGSTOP"], options.engines or [2, 1]
    for victim, name, count in itertools.product(options.victim or VICTIMS, signals, engines):
        with tempfile.TemporaryDirectory() as folder:
            print(strike(victim, name, count, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
