"""Measure seconds per step with slow rewards in a real run, for five ways to overlap work, against formulas.

    python -m benchmarks.real_delays --steps 20           # about 15 minutes; alone on the machine

Ray, vLLM, verifiers, FSDP and weight sync are real, with the tiny countdown model. Only the judge is simulated: each
reward waits uniform(0.2, 4) s, 64 at a time. A step has N = 128 samples in groups of 8. `ours` is this library. In the
other modes, some of its parts wait for whole steps:

    sync       on-policy; scored when all of the step are generated, trained on when all of them are scored
    pipeline   on-policy; scored when all are generated, trained on in micro-batches as they fill up
    one-off    like sync, one step behind
    both       like pipeline, one step behind
    ours       one step behind; scored while the others still generate, trained on in micro-batches as they fill up

G (generation with all hand-overs), U (computing), W (weight sync) are measured first, by `sync` without delays. With D
the delay of a reward, mu its mean, c = 64 places and M micro-batches, R = N mu / c - E[D^2] / (2 mu) + Dmax is the time
that the rewards of a step take, and a step should take

    sync       G + R + U + W
    pipeline   G + R + U / M + W
    one-off    max(G + W, U + W, N mu / c, (G + R + U + W) / 2)
    both       max(G + W, U + W, N mu / c, (G + R + U / M + W) / 2)
    ours       max(G + W, U + W, N mu / c, (max(G, R) + U / M + W) / 2)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DATA = HERE.parent / "sample-data"
GROUPS, MEMBERS, SLOTS, LOW, HIGH, M = 16, 8, 64, 0.2, 4.0, 4
N = GROUPS * MEMBERS
MEAN, SECOND_MOMENT = (LOW + HIGH) / 2, (HIGH**3 - LOW**3) / (3 * (HIGH - LOW))
BUSY = N * MEAN / SLOTS
R = BUSY - SECOND_MOMENT / (2 * MEAN) + HIGH
WHOLE_GENERATION = f"--engine={HERE / 'real_delays_engine.py'}:StepwiseEngine"
WHOLE_STEP = f"--advantage-estimator={HERE / 'real_delays_rewards.py'}:grpo_whole_step"
# Mode -> staleness, and the options that make parts wait for whole steps
MODES: dict[str, tuple[int, list[str]]] = {
    "sync": (0, [WHOLE_GENERATION, WHOLE_STEP]),
    "pipeline": (0, [WHOLE_GENERATION]),
    "one-off": (1, [WHOLE_GENERATION, WHOLE_STEP]),
    "both": (1, [WHOLE_GENERATION]),
    "ours": (1, []),
}


def run(mode: str, steps: int, skip: int, *, delays: bool = True) -> list[dict[str, Any]]:
    """Return the metrics lines of one run, without the first `skip`."""
    folder = Path(tempfile.mkdtemp(prefix="real-delays-"))
    staleness, held_back = MODES[mode]
    command = [
        *[sys.executable, "-m", "async_grpo", "run", f"--output-dir={folder}", f"--run-name={folder.name}"],
        *[f"--model-name-or-path={DATA / 'tiny-model'}", f"--data-path={DATA / 'countdown_train.jsonl'}"],
        *[
            "--reward-fns=slow_countdown",
            f"--reward-registry={HERE / 'real_delays_rewards.py'}",
            "--verifiers-per-reward=1",
        ],
        *([] if delays else ["--reward-options=low=0,high=0"]),
        *[
            f"--batch-size={GROUPS}",
            f"--samples-per-question={MEMBERS}",
            f"--num-training-batches={steps + skip}",
        ],
        *[
            "--max-generation-tokens=24",
            "--max-tokens-per-gpu=1024",
            "--enforce-eager",
            "--learning-rate=1e-5",
        ],
        *[f"--max-staleness={staleness}", *held_back],
    ]
    subprocess.run(command, check=True, cwd=HERE.parent, stdout=sys.stderr, timeout=1800)
    lines = [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]
    for line in lines:  # a failed reward is quick, so the measurement would be wrong
        assert line["num_reward_ok"] == N, line
    return lines[skip:]


def closed_form(mode: str, g: float, u: float, w: float) -> float:
    """Return the ideal seconds per step, by the formula at the top of this file."""
    staleness, _ = MODES[mode]
    trained = u if mode in ("sync", "one-off") else u / M
    latency = (max(g, R) if mode == "ours" else g + R) + trained + w
    return latency if staleness == 0 else max(g + w, u + w, BUSY, latency / 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=5, help="number of first steps that are not measured")
    args = parser.parse_args()
    alone = run("sync", args.steps, args.skip, delays=False)
    keys = ("seconds_waiting_for_experience", "seconds_computing", "seconds_publishing_weights")
    g, u, w = (statistics.median(line[key] for line in alone) for key in keys)
    print(f"G {g:.2f} s, U {u:.2f} s, W {w:.2f} s; R {R:.2f} s, N mu / c {BUSY:.2f} s", flush=True)
    failures, sync_s = [], 0.0
    for mode in MODES:
        seconds = [line["time_per_batch"] for line in run(mode, args.steps, args.skip)]
        mean, ideal = statistics.mean(seconds), closed_form(mode, g, u, w)
        sync_s = sync_s or mean
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
        print(
            f"{mode:>9}: {mean:.2f} s a step ({spread}), closed form {ideal:.2f} ({mean / ideal - 1:+.1%}), "
            f"{1 - mean / sync_s:.1%} less than sync",
            flush=True,
        )
        if abs(mean / ideal - 1) > 0.07:
            failures.append(f"{mode} is {mean / ideal - 1:+.1%} off its closed form")
    if 1 - mean / sync_s < 0.40:
        failures.append("ours saves less than 40 % of the synchronous step")
    print("\n".join(failures) or "within all bounds")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
