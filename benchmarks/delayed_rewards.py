"""Measure the seconds per step with slow rewards at --max-staleness 0 and 1.

    python benchmarks/delayed_rewards.py --steps 24

Every reward waits 0.5 to 1 s, and takes no CPU. With staleness 0, a step waits for generation, for the slowest reward,
and for the training. With staleness 1, the samples of the next step are generated and scored during the training. Ray,
vLLM and FSDP are real.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_STEPS = 4


def run(staleness: int, steps: int) -> list[dict]:
    """Return the metrics lines of one run."""
    folder, data = Path(tempfile.mkdtemp(prefix="delayed-")), ROOT / "sample-data"
    command = [
        *[
            sys.executable,
            "-m",
            "async_grpo",
            "run",
            f"--output-dir={folder}",
            f"--max-staleness={staleness}",
        ],
        *[f"--model-name-or-path={data / 'tiny-model'}", f"--data-path={data / 'countdown_train.jsonl'}"],
        *["--reward-fns=slow_countdown", f"--reward-registry={ROOT / 'benchmarks' / 'slow_rewards.py'}"],
        *[
            "--verifiers-per-reward=64",
            "--batch-size=8",
            "--samples-per-question=8",
            "--max-generation-tokens=24",
        ],
        *[
            "--max-tokens-per-gpu=1024",
            f"--num-training-batches={steps}",
            "--nproc-per-node=2",
            "--enforce-eager",
        ],
        *["--learning-rate=1e-5", f"--run-name={folder.name}"],
    ]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr, timeout=900)
    lines = [json.loads(line) for line in (folder / "training_metrics.jsonl").read_text().splitlines()]
    for line in lines:  # a failed reward is quick, so the measurement would be wrong
        assert line["num_reward_ok"] == line["samples_in_batch"], line
        assert line["verifiers"]["slow_countdown"]["latency_p50_s"] >= 0.5, line
    return lines[WARM_UP_STEPS:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24)
    steps = parser.parse_args().steps
    medians = {}
    for staleness in (0, 1):
        lines = run(staleness, steps)
        medians[staleness] = statistics.median(line["time_per_batch"] for line in lines)
        waited = statistics.median(line["seconds_waiting_for_experience"] for line in lines)
        age = statistics.mean(line["staleness_mean"] for line in lines)
        print(f"max-staleness {staleness}: {medians[staleness]:.2f} s per step (median of {len(lines)}), "
              f"of which {waited:.2f} s waiting for experience; mean staleness {age:.2f}")  # fmt: skip
    print(f"ratio: {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    main()
