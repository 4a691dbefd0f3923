"""Train the tiny countdown model once, for the experiments in this folder."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "sample-data"


@dataclass(frozen=True)
class FinishedRun:
    """The lines of metrics and evaluations that a run wrote."""

    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    def accuracy(self) -> dict[int, float]:
        """Return the fraction of held-out tasks that are solved, by step, with one completion each at temperature 1."""
        return {line["step"]: line["eval_countdown/answer_reward"] for line in self.evaluations}

    def mean(self, key: str) -> float:
        """Return the mean of a metric over all steps."""
        return sum(line[key] for line in self.steps) / len(self.steps)


def countdown_run(
    *options: str, seed: int, steps: int, eval_every: int, timeout_s: float = 1800
) -> FinishedRun:
    """Train the tiny model for `steps` steps of 16 questions x 8 samples. Pass `options` to `async-grpo run`.

    Raises:
        subprocess.CalledProcessError: The run failed.
        subprocess.TimeoutExpired: The run took longer than `timeout_s`.
    """
    folder = Path(tempfile.mkdtemp(prefix="experiment-"))
    command = [
        *[sys.executable, "-m", "async_grpo", "run", f"--output-dir={folder}", f"--run-name={folder.name}"],
        *[f"--model-name-or-path={DATA / 'tiny-model'}", f"--data-path={DATA / 'countdown_train.jsonl'}"],
        *[f"--eval-data-path={DATA / 'countdown_heldout.jsonl'}", f"--eval-every={eval_every}"],
        *["--batch-size=16", "--samples-per-question=8", f"--num-training-batches={steps}"],
        *["--learning-rate=2e-4", "--num-warmup-steps=5", "--max-generation-tokens=24"],
        *["--max-tokens-per-gpu=4096", "--max-num-seqs=256", "--enforce-eager"],
        f"--infinite-sampler-seed={seed}",
    ]
    if not any(option.startswith("--reward-fns") for option in options):
        command.append("--reward-fns=countdown")
    subprocess.run([*command, *options], check=True, cwd=ROOT, stdout=sys.stderr, timeout=timeout_s)
    return FinishedRun(_lines(folder / "training_metrics.jsonl"), _lines(folder / "eval_metrics.jsonl"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
