"""A real lack of memory in a run arrives at the console and in `async-grpo why`, with the option to change."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import OPTIONS, left_behind

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
# More memory than any machine has: the allocator of torch refuses it
TOO_MANY_BYTES = 1 << 50
LOSS = f"""
import torch

def greedy(batch):
    if batch.mask.numel() > 1:  # not when the loss is tried before the start
        torch.empty({TOO_MANY_BYTES}, dtype=torch.uint8)
    return batch.ratio, {{}}
"""


def ended(folder: Path, **options: object) -> tuple[str, str]:
    """Run until the end, and return what the user sees, and what `why` then says."""
    usual = {"output-dir": folder / "run", "run-name": folder.name, "num-training-batches": 2, "kl-coef": 0}
    usual |= {"reward-fns": "countdown", "nproc-per-node": 1, "engine-restarts": 0}
    command = [sys.executable, "-m", "async_grpo", "run"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in (OPTIONS | usual | options).items()]
    variables = {**os.environ, "RUN_MARK": str(folder), "COLUMNS": "2000"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, env=variables)
    output = run.stdout + run.stderr
    assert run.returncode == 1, output
    why = [sys.executable, "-m", "async_grpo", "why", str(folder / "run")]
    explanation = subprocess.run(
        why, capture_output=True, text=True, timeout=60, env=variables, check=True
    ).stdout
    assert not left_behind(folder)
    return output, explanation


@pytest.mark.exhaustive
def test_of_the_trainer(tmp_path):
    (tmp_path / "loss.py").write_text(LOSS)
    texts = ended(tmp_path, engine="fake", policy_loss=f"{tmp_path / 'loss.py'}:greedy")
    for text in texts:
        assert "out of memory in the forward pass of a micro-batch of" in text, text
        assert "on trainer rank 0 at step 1: lower --max-tokens-per-gpu, use --gradient-checkpointing" in text
        assert "planned for this trainer rank: about" in text and "can't allocate memory" in text


@pytest.mark.exhaustive
def test_of_an_engine_whose_process_alone_knows_the_cause(tmp_path):
    texts = ended(tmp_path, engine_options=f"kv_cache_memory_bytes={TOO_MANY_BYTES}")
    for text in texts:
        assert "out of memory while an engine started, with about" in text, text
        assert "lower --max-num-seqs" in text and "planned for this engine: about" in text
        assert "is less than requested memory for kv" in text
