"""Runs with a LoRA adapter: the engine generates with the trainer's adapter, in both ways in which it gets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from real_runs import ROOT, lines
from transformers import AutoModelForCausalLM

from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
STEPS = 3


def train(folder: Path, sync: str, *more: str) -> None:
    """Run `async-grpo run` to its end. The learning rate is high, so that an engine without the adapter would differ."""
    options = {
        "model-name-or-path": TINY_MODEL,
        "data-path": COUNTDOWN_TRAIN,
        "reward-fns": "countdown,format",
        "batch-size": 4,
        "samples-per-question": 4,
        "num-training-batches": STEPS,
        "max-staleness": 0,
        "max-tokens-per-gpu": 512,
        "max-generation-tokens": 12,
        "kl-coef": 0.01,
        "lora-rank": 4,
        "lora-sync": sync,
        "learning-rate": 1e-2,
        "num-warmup-steps": 0,
        "output-dir": folder,
        "run-name": f"lora-{sync}",
    }
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
    command += [*(f"--{name}={value}" for name, value in options.items()), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sync", ["adapter", pytest.param("merged", marks=pytest.mark.exhaustive)])
def test_each_step_trains_on_tokens_of_the_current_adapter_and_peft_loads_what_was_learned(tmp_path, sync):
    folder = tmp_path / "run"
    train(folder, sync)
    metrics = lines(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["mismatch_kl"] < 1e-7 for line in metrics)
    # The reference is the base, from which the policy moves away; no reference worker runs
    assert metrics[0]["avg_kl_div"] == pytest.approx(0, abs=1e-9) and metrics[2]["avg_kl_div"] > 1e-4
    (exported,) = (folder / "hf_format").iterdir()
    ids = torch.arange(5, 30)[None]
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    before = base(ids).logits.clone()
    learned = PeftModel.from_pretrained(base, exported)(ids).logits
    assert (learned - before).abs().max() > 0.01


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_cells_of_the_notebook_train_a_real_model_and_load_its_adapter(
    tmp_path, monkeypatch, capsys, smollm2_folder
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORA_STEPS", "1")
    notebook = json.loads((ROOT / "examples" / "lora.ipynb").read_text())
    names: dict = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "cell", "exec"), names)
    assert [line["step"] for line in names["result"].metrics] == [1]
    # One step is too few for the right answer each time
    assert "Portugal" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_engines_sample_with_the_values_of_a_base_in_4_bits(tmp_path, sync):
    """Original weights in the engines would show: their KL to the base in 4 bits is thousands of times as large."""
    folder = tmp_path / "run"
    train(folder, sync, "--load-in-4bit")
    metrics = lines(folder)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["mismatch_kl"] < 1e-7 for line in metrics)
    assert metrics[0]["avg_kl_div"] == pytest.approx(0, abs=1e-9) and metrics[2]["avg_kl_div"] > 1e-4
