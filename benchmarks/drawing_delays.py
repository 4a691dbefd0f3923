"""Measure seconds per step with slow rewards of pictures, synchronous and asynchronous, against formulas.

    python -m benchmarks.drawing_delays --steps 12           # about 4 minutes

The run is a real one (Ray, the engine that draws, reward processes, a trainer rank, weight sync) on the model of
`scripts/demo --draw` with random weights. Only the judge is simulated: each reward waits uniform(0.1, 2) s, 64 at a
time. A step has N = 128 pictures in groups of 8. Both modes use the same library. In the mode `sync`, the engine and
the trainer wait for whole steps:

    sync    on-policy; scored when all pictures of the step are drawn, trained on when all of them are scored
    async   one step behind; scored while other pictures are drawn, trained on in micro-batches as they fill up

`sync` without delays measures G (drawing with all hand-overs), U (computing) and W (weight sync) in the same call. With
D the delay of a reward, mu its mean, c = 64 places and M micro-batches, R = N mu / c - E[D^2] / (2 mu) + Dmax is the
time that the rewards of a step take, and a step should take

    sync    G + R + U + W
    async   max(G + W, U + W, N mu / c, (max(G, R) + U / M + W) / 2)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.data.digits import label_names
from async_grpo.data.digits_model import make_digits_model

HERE = Path(__file__).resolve().parent
NUM_GROUPS = 16
GROUP_SIZE = 8
NUM_PICTURES = NUM_GROUPS * GROUP_SIZE
NUM_DENOISING_STEPS = 10
NUM_MICRO_BATCHES = 4
NUM_PLACES = 64  # rewards that wait at a time: the capacity of an asynchronous reward
LOWEST_DELAY_S = 0.1
HIGHEST_DELAY_S = 2.0
MEAN_DELAY_S = (LOWEST_DELAY_S + HIGHEST_DELAY_S) / 2
# E[D^2] of a uniform distribution
MEAN_SQUARED_DELAY = (HIGHEST_DELAY_S**3 - LOWEST_DELAY_S**3) / (3 * (HIGHEST_DELAY_S - LOWEST_DELAY_S))
BUSY_S = NUM_PICTURES * MEAN_DELAY_S / NUM_PLACES
REWARDS_S = BUSY_S - MEAN_SQUARED_DELAY / (2 * MEAN_DELAY_S) + HIGHEST_DELAY_S
SYNC = "sync"
ASYNC = "async"
MODE_OPTIONS = {
    SYNC: (
        "--max-staleness=0",
        f"--engine={HERE / 'drawing_delays_engine.py'}:StepwiseDrawing",
        # The estimator is a function that declares nothing, so the library must assume that it needs all groups of the
        # step
        f"--advantage-estimator={HERE / 'real_delays_rewards.py'}:grpo_whole_step",
    ),
    ASYNC: ("--max-staleness=1", "--engine=drawing"),
}
LARGEST_DIFFERENCE = 0.10  # allowed relative difference between measurement and formula
SMALLEST_SPEEDUP = 1.5


def metrics_lines(
    mode: str, model: Path, num_steps: int, num_skipped: int, *, has_delays: bool = True
) -> list[dict[str, Any]]:
    """Return the metrics of the steps of one run, without those of its first `num_skipped` steps."""
    folder = Path(tempfile.mkdtemp(prefix="drawing-delays-"))
    rows = [json.dumps({"input": name}) for name in label_names().values()]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    options = {
        "policy": "flow",
        "output-dir": folder / "run",
        "run-name": folder.name,
        "model-name-or-path": model,
        "data-path": folder / "rows.jsonl",
        "reward-fns": f"{HERE / 'drawing_delays_rewards.py'}:slow_brightness",
        "verifiers-per-reward": 1,
        "batch-size": NUM_GROUPS,
        "samples-per-question": GROUP_SIZE,
        "num-training-batches": num_steps + num_skipped,
        "max-generation-tokens": NUM_DENOISING_STEPS,
        "temperature": 0.7,
        # a micro-batch counts (picture, step) pairs, and one more for each picture
        "max-tokens-per-gpu": NUM_PICTURES // NUM_MICRO_BATCHES * (NUM_DENOISING_STEPS + 1),
        "max-num-seqs": NUM_PICTURES,
        "learning-rate": 1e-5,
        "nproc-per-node": 1,
    }
    if not has_delays:
        options["reward-options"] = "low=0,high=0"
    command = [sys.executable, "-m", "async_grpo", "run"]
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(
        [*command, *MODE_OPTIONS[mode]], check=True, cwd=HERE.parent, stdout=sys.stderr, timeout=1800
    )
    text = (folder / "run" / "training_metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        # A failed reward is quick, so the measurement would be wrong
        assert line["num_reward_ok"] == NUM_PICTURES, line
    return lines[num_skipped:]


def closed_form_s(mode: str, drawing_s: float, computing_s: float, sync_s: float) -> float:
    """Return the ideal seconds per step; see the top of this file."""
    if mode == SYNC:
        return drawing_s + REWARDS_S + computing_s + sync_s
    latency_s = max(drawing_s, REWARDS_S) + computing_s / NUM_MICRO_BATCHES + sync_s
    return max(drawing_s + sync_s, computing_s + sync_s, BUSY_S, latency_s / 2)


def median_of(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Return the median of a metric over steps."""
    return statistics.median(line[key] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="number of first steps that are not measured")
    args = parser.parse_args()
    model = Path(tempfile.mkdtemp(prefix="drawing-delays-")) / "model"
    make_digits_model(model, num_steps=0)
    lines = metrics_lines(SYNC, model, args.steps, args.skip, has_delays=False)
    drawing_s = median_of(lines, "seconds_waiting_for_experience")
    computing_s = median_of(lines, "seconds_computing")
    sync_s = median_of(lines, "seconds_publishing_weights")
    print(
        f"G {drawing_s:.2f} s, U {computing_s:.2f} s, W {sync_s:.2f} s; R {REWARDS_S:.2f} s, N mu / c {BUSY_S:.2f} s",
        flush=True,
    )
    failures = []
    means_s = {}
    for mode in MODE_OPTIONS:
        lines = metrics_lines(mode, model, args.steps, args.skip)
        mean_s = statistics.mean(line["time_per_batch"] for line in lines)
        means_s[mode] = mean_s
        ideal_s = closed_form_s(mode, drawing_s, computing_s, sync_s)
        difference = mean_s / ideal_s - 1
        print(
            f"{mode:>5}: {mean_s:.2f} s a step, closed form {ideal_s:.2f} s ({difference:+.1%})", flush=True
        )
        if abs(difference) > LARGEST_DIFFERENCE:
            failures.append(f"{mode} is {difference:+.1%} off its closed form")
    speedup = means_s[SYNC] / means_s[ASYNC]
    print(f"asynchronous rewards are {speedup:.2f} x faster")
    if speedup < SMALLEST_SPEEDUP:
        failures.append(f"less than {SMALLEST_SPEEDUP} x faster")
    print("\n".join(failures) or "within all bounds")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
