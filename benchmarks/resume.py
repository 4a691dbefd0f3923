"""Kill a real run again and again, and compare it with a run that was never killed.

Was anything skipped, doubled or biased?

    python -m benchmarks.resume --kills 10           # about 20 minutes on 2 cores

Both train with a learning rate of almost 0, so that the same seeds should give the same completions, except for
rounding. When a start continues from a checkpoint, some groups are unfinished in it. The lengths of their completions
are compared with those of the same groups in the whole run: the difference of the means over groups, in standard
errors.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from async_grpo.training.checkpoint_folder import newest
from benchmarks.against_trl.cases import DATA

BATCH, GROUP = 16, 8
OPTIONS = {
    "model-name-or-path": DATA / "tiny-model",
    "data-path": DATA / "countdown_train.jsonl",
    "reward-fns": "countdown",
    "batch-size": BATCH,
    "samples-per-question": GROUP,
    "max-generation-tokens": 64,
    "max-tokens-per-gpu": 2048,
    "learning-rate": 1e-12,
    "max-staleness": 2,
    "checkpoint-every-s": 3,
    "dump-samples-filename": "samples.jsonl",
}


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    own = {"output-dir": folder, "run-name": folder.name, "num-training-batches": steps}
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in (OPTIONS | own).items()]
    console = (folder.parent / f"{folder.name}.txt").open("a")
    return subprocess.Popen(
        command, stdout=console, stderr=console, text=True, env={**os.environ, "RUN_MARK": folder.name}
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kill(run: subprocess.Popen[str], folder: Path, chance: random.Random) -> bool:
    """Kill the launcher at a random time within its steps, which ends the whole run.

    Return False if the run had ended before.
    """
    before = len(lines(folder / "training_metrics.jsonl"))
    while len(lines(folder / "training_metrics.jsonl")) <= before:
        if run.poll() is not None:
            return False
        time.sleep(0.1)
    time.sleep(chance.uniform(0, 8))
    if run.poll() is not None:
        return False
    run.send_signal(signal.SIGKILL)
    run.wait()
    time.sleep(5)
    return True


def under_way(folder: Path) -> set[int]:
    """Return the ordinals of the prompts whose completions the next start generates again."""
    found = newest(folder)
    if found is None:
        return set()
    rows = json.loads((found[0] / "experience.json").read_text())["groups"]
    return {row["ordinal"] for row in rows if row["samples"] is None}


def lengths(folder: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for row in lines(folder / "samples.jsonl"):
        found[row["group"]].append(len(row["completion"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, again, kills = random.Random(options.seed), set[int](), 0
    with tempfile.TemporaryDirectory() as place:
        whole, killed = Path(place) / "whole", Path(place) / "killed"
        assert start(whole, options.steps).wait(3600) == 0, (Path(place) / "whole.txt").read_text()[-3000:]
        for _ in range(options.kills):
            run = start(killed, options.steps)
            if not kill(run, killed, chance):
                break
            kills += 1
            again |= under_way(killed)
        last = start(killed, options.steps).wait(3600)
        assert last == 0, (Path(place) / "killed.txt").read_text()[-3000:]
        steps = [line["step"] for line in lines(killed / "training_metrics.jsonl")]
        expected, found = lengths(whole), lengths(killed)
    counted = sorted(found) == list(range(options.steps * BATCH)) and all(
        len(of) == GROUP for of in found.values()
    )
    print(f"{kills} kills; steps whole and in order: {steps == list(range(1, options.steps + 1))}")
    print(f"every prompt trained once, none skipped: {counted}")
    same = sum(sorted(found[n]) == sorted(expected[n]) for n in expected) / len(expected)
    print(f"groups whose completions have the same lengths as in the whole run: {same:.1%}")
    differences = [statistics.fmean(found[n]) - statistics.fmean(expected[n]) for n in again if n in expected]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    mean = statistics.fmean(differences) if differences else math.nan
    score = mean / error if error else 0.0
    print(
        f"{len(differences)} groups generated again: their mean length differs by {mean:+.3f} characters, "
        f"{score:+.2f} standard errors (beyond 2.58 it would be biased, at 1 %)"
    )


if __name__ == "__main__":
    main()
