"""A real pretrained model: a run of three steps in float32 and in bfloat16, its continuation and its export."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from long_tests import long_without_bfloat16
from real_runs import lines

from async_grpo.data import CAPITALS_TRAIN

# The same run with the sample model is test_whole_chain.py; its continuation and its export have tests of their own
pytestmark = [pytest.mark.real, pytest.mark.exhaustive, pytest.mark.timeout(600)]
STEPS = 3
DTYPES = ["float32", pytest.param("bfloat16", marks=long_without_bfloat16)]
# 1e-10 and 0.002 are usual
ALLOWED_MISMATCH = {"float32": 1e-6, "bfloat16": 0.02}


def train(folder: Path, model: Path, dtype: str, **changes: Any) -> str:
    """Run `async-grpo run` to its end, and return its output."""
    options = {
        "model-name-or-path": model,
        "data-path": CAPITALS_TRAIN,
        "reward-fns": "regex",
        "reward-options": "search=true",
        "verifiers-per-reward": 1,
        "dtype": dtype,
        "batch-size": 2,
        "samples-per-question": 4,
        "num-training-batches": STEPS,
        "max-staleness": 0,
        "max-tokens-per-gpu": 512,
        "max-generation-tokens": 12,
        "learning-rate": 2e-5,
        "num-warmup-steps": 0,
        "output-dir": folder,
        "run-name": folder.name,
        "start-timeout-s": 400,
        "experience-timeout-s": 300,
    } | changes
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager", "--no-mask-truncated"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=DTYPES)
def run(request, smollm2_folder, tmp_path_factory) -> tuple[str, Path]:
    """The dtype and the folder of a run."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    train(folder, smollm2_folder, request.param)
    return request.param, folder


def test_a_healthy_engine_of_a_real_model_is_accepted_and_the_run_takes_its_steps(run):
    """Before, noise and rounding in 30 trained layers made 0.67 of what the self-test allowed 0.38, in bfloat16."""
    metrics = lines(run[1])
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["samples_in_batch"] == 8 for line in metrics)
    assert any(line["grad_norm"] > 0 for line in metrics)  # groups of equal rewards teach nothing


def test_engine_and_trainer_agree_on_the_log_probs_as_far_as_the_dtype_lets_them(run):
    dtype, folder = run
    measured = [line["mismatch_kl"] for line in lines(folder)[:STEPS] if "mismatch_kl" in line]
    assert measured and max(measured) < ALLOWED_MISMATCH[dtype]


@pytest.mark.parametrize("run", ["float32"], indirect=True)  # another start takes a minute
def test_the_run_goes_on_from_its_checkpoint_and_is_exported_with_the_chat_template(
    run, smollm2_folder, tmp_path
):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dtype, folder = run
    # The engine that starts sooner: what goes on is the trainer
    said = train(folder, smollm2_folder, dtype, **{"num-training-batches": STEPS + 1, "engine": "fake"})
    assert f"resumed after step {STEPS}" in said, said
    assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 2))

    target = tmp_path / "exported"
    command = [
        sys.executable,
        "-m",
        "async_grpo",
        "export",
        str(folder),
        f"--output-dir={target}",
        f"--dtype={dtype}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    exported = AutoModelForCausalLM.from_pretrained(target).state_dict()
    before = AutoModelForCausalLM.from_pretrained(smollm2_folder).state_dict()
    assert exported.keys() == before.keys()
    changed = [
        name for name, weight in exported.items() if not torch.equal(weight, before[name].to(weight.dtype))
    ]
    assert changed and all(weight.isfinite().all() for weight in exported.values())
    written = AutoModelForCausalLM.from_pretrained(
        max((folder / "hf_format").iterdir(), key=os.path.getmtime)
    )
    assert all(torch.equal(weight, exported[name]) for name, weight in written.state_dict().items())
    templates = [AutoTokenizer.from_pretrained(path).chat_template for path in (target, smollm2_folder)]
    assert templates[0] == templates[1] and "<|im_start|>" in json.dumps(templates[0])
