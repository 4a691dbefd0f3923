"""A real pretrained model in bfloat16: a run of three steps, and what the proof of landing makes of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from long_tests import long_without_bfloat16

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), long_without_bfloat16]
STEPS = 3
COUNTRIES = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Spain": "Madrid"}
REWARD = """
def names_it(sample, **options):
    return {"reward": float(sample["answer"].lower() in sample["completion"].lower())}
"""


@pytest.fixture(scope="module")
def lines(smollm2_folder, tmp_path_factory) -> list[dict]:
    """The metrics of a run, a line per step."""
    folder = tmp_path_factory.mktemp("run")
    questions = [
        {"messages": [{"role": "user", "content": f"What is the capital of {country}?"}], "answer": capital}
        for country, capital in COUNTRIES.items()
    ]
    data, reward = folder / "capitals.jsonl", folder / "capitals.py"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    reward.write_text(REWARD)
    options = {
        "model-name-or-path": smollm2_folder,
        "data-path": data,
        "reward-fns": f"{reward}:names_it",
        "dtype": "bfloat16",
        "batch-size": 2,
        "samples-per-question": 4,
        "num-training-batches": STEPS,
        "max-tokens-per-gpu": 512,
        "max-generation-tokens": 8,
        "learning-rate": 2e-5,
        "num-warmup-steps": 0,
        "output-dir": folder / "out",
        "run-name": folder.name,
        "start-timeout-s": 400,
        "experience-timeout-s": 300,
    }
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager", "--no-mask-truncated"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = Path(folder, "out", "training_metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_a_healthy_engine_of_a_real_model_in_bfloat16_is_accepted_and_the_run_takes_its_steps(lines):
    """Before, noise and rounding in 30 trained layers made 0.67 of what the self-test allowed 0.38."""
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert all(line["samples_in_batch"] == 8 for line in lines)
    assert any(line["grad_norm"] > 0 for line in lines)  # groups of equal rewards teach nothing


def test_engine_and_trainer_agree_on_the_log_probs_as_far_as_bfloat16_lets_them(lines):
    measured = [line["mismatch_kl"] for line in lines if "mismatch_kl" in line]
    assert measured and max(measured) < 0.02  # 0.002 is usual; in float32 it is 1e-10
