"""A policy that draws from texts, through the whole chain: engine, rewards, two ranks, resumption, evaluation, export."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_runs import lines
from safetensors.numpy import load_file
from tiny_flow import NEEDS_DIFFUSERS
from tiny_pipelines import PICTURE_SIZE, save_tiny_pipeline

pytestmark = [NEEDS_DIFFUSERS, pytest.mark.real, pytest.mark.timeout(600)]
REWARDS = """
import numpy as np

def dark(sample):
    assert sample["picture"].size == (16, 16) and sample["picture"].mode == "RGB"
    return float(np.asarray(sample["picture"]).mean() / 255)

def varied(sample):
    return float(np.asarray(sample["picture"]).std() / 255)
"""


def train(folder: Path, model: Path, steps: int) -> str:
    """Run `async-grpo run` for some steps, or continue the run in the folder, and return its output."""
    (folder / "rewards.py").write_text(REWARDS)
    rows = [
        {"input": f"a {color} ball on a table"} for color in ("red", "blue", "green", "dark yellow", "gray")
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "policy": "flow",
        "engine": "drawing",
        "model-name-or-path": model,
        "data-path": folder / "rows.jsonl",
        "eval-data-path": folder / "rows.jsonl",
        "eval-temperature": 0,
        "eval-max-tokens": 8,
        **reward_options(folder),
        "batch-size": 4,
        "samples-per-question": 4,
        "num-training-batches": steps,
        "max-generation-tokens": 4,
        "temperature": 0.7,
        "flow-window": 3,
        "max-staleness": 0,
        "max-tokens-per-gpu": 20,
        "kl-coef": 0.01,
        "picture-size": PICTURE_SIZE,
        "guidance": 2.0,
        "checkpoint-every-s": 0.01,
        "learning-rate": 1e-2,
        "num-warmup-steps": 0,
        "nproc-per-node": 2,
        "output-dir": folder / "run",
        "run-name": "drawing",
    }
    return call("run", *(f"--{name}={value}" for name, value in options.items()))


def reward_options(folder: Path) -> dict[str, str]:
    return {
        "reward-fns": f"{folder}/rewards.py:dark,{folder}/rewards.py:varied",
        "reward-combine": "sum",
        "reward-weights": "dark=1,varied=0.5",
    }


def call(*arguments: str) -> str:
    """Run a command of async-grpo, and return its output."""
    command = [sys.executable, "-m", "async_grpo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.exhaustive
def test_a_run_draws_trains_saves_and_goes_on(tmp_path):
    model = save_tiny_pipeline("stable_diffusion_3", tmp_path / "model")
    train(tmp_path, model, 2)
    train(tmp_path, model, 3)
    metrics = lines(tmp_path / "run")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        # Engine and trainer compute the same log-probs, of the same weights
        assert line["mismatch_kl"] < 1e-6 and line["update_skipped"] == 0
        assert line["avg_output_tokens"] == 3 and line["canary_error"] < 1e-4
        assert line["ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert metrics[2]["avg_kl_div"] > 0
    evaluations = lines(tmp_path / "run", "eval_metrics.jsonl")
    assert evaluations[-1]["eval_avg_reward"] is not None and "eval_avg@1" not in evaluations[-1]
    (sample, *_) = lines(tmp_path / "run", "eval_samples_0.jsonl")
    assert sample["picture"].startswith("data:image/png;base64,")
    (newest,) = (tmp_path / "run" / "hf_format").glob("samples_48")
    assert (newest / "model_index.json").is_file()
    # The checkpoint is evaluated with the options of its run, and draws what the run drew at its end
    rewards = [f"--{name}={value}" for name, value in reward_options(tmp_path).items()]
    call("eval", str(tmp_path / "run"), f"--output-dir={tmp_path / 'eval'}", *rewards)
    (result,) = lines(tmp_path / "eval", "eval_results.jsonl")
    assert result["eval_avg_reward"] == pytest.approx(evaluations[-1]["eval_avg_reward"], abs=1e-3)
    call("export", str(tmp_path / "run"), f"--output-dir={tmp_path / 'exported'}", "--dtype=float32")
    file = "transformer/diffusion_pytorch_model.safetensors"
    exported = load_file(tmp_path / "exported" / file)
    assert all(np.array_equal(exported[name], tensor) for name, tensor in load_file(newest / file).items())
