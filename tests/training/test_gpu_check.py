"""`scripts/gpu_check` must work on the day there is a GPU: its rows run here in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from async_grpo.training.distributed import Ranks
from benchmarks import gpu_check

ROOT = Path(gpu_check.__file__).parent.parent


@pytest.mark.slow
def test_every_row_passes_in_small_and_what_is_not_installed_is_named(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [
        ROOT / "scripts" / "gpu_check",
        "--tiny",
        "--device=cpu",
        f"--output-dir={tmp_path}",
        "--ranks=2",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {name: row["outcome"] for name, row in report["rows"].items()} == dict.fromkeys(
        gpu_check.ROWS, "passed"
    ), done.stderr
    assert done.returncode == 0
    assert report["installed"].keys() == {"vllm", "ray", "flash_attn", "trl", "torchao"}
    assert (tmp_path / "gpu_check.md").read_text().count("passed") == len(gpu_check.ROWS)
    together = json.loads((tmp_path / "2_ranks" / "gpu_check.json").read_text())["rows"]
    assert {name: row["outcome"] for name, row in together.items()} == dict.fromkeys(
        gpu_check.OF_RANKS, "passed"
    )
    assert together["memory"]["copies"]["gradient_cosine"] > 0.9999


def test_a_row_that_breaks_says_so_and_one_that_misses_its_bar_fails():
    bench = gpu_check.Bench(Ranks(0, 1, torch.device("cpu")), tiny=True)
    broke = gpu_check.checked(lambda bench: 1 / 0, bench)
    assert (broke["outcome"], broke["error"]) == ("broke", "ZeroDivisionError: division by zero")
    failed = gpu_check.checked(lambda bench: {"ratio": 0.5, "passed": False}, bench)
    assert (failed["outcome"], failed["ratio"]) == ("failed", 0.5)
