"""`scripts/gpu_check` must work on the day there is a GPU: its rows run here in small."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from warm_servers import VARIABLES

from async_grpo.training.distributed import Ranks
from benchmarks import gpu_check

ROOT = Path(gpu_check.__file__).parent.parent


@pytest.mark.parametrize("name", [name for name in gpu_check.ROWS if name != "compile"])  # which takes longer
def test_a_row_passes_in_small(ranks, name):
    outcome = gpu_check.checked(gpu_check.ROWS[name], gpu_check.Bench(ranks, tiny=True))
    assert outcome["outcome"] == "passed", outcome


@pytest.mark.exhaustive
def test_every_row_passes_in_small_and_what_is_not_installed_is_named(tmp_path, warm):
    environment = os.environ | VARIABLES | {"PYTHON": str(warm.torch)}
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


def test_two_calls_of_half_the_rows_make_one_report_and_none_runs_beyond_its_time(tmp_path, monkeypatch):
    assert sorted([*gpu_check.PARTS[1], *gpu_check.PARTS[2]]) == sorted(gpu_check.ROWS)
    assert gpu_check.LIMIT_S < 9 * 60 - 20
    begun = []

    def row(name):
        def run(bench):
            begun.append(name)
            if name == "canary":
                time.sleep(30)  # interrupted
            return {"passed": True}

        return run

    monkeypatch.setattr(gpu_check, "ROWS", {name: row(name) for name in gpu_check.ROWS})
    for part, limit_s, failed in ((1, 60.0, False), (2, 0.2, True)):
        assert gpu_check.check_rows(True, list(gpu_check.PARTS[part]), tmp_path, "cpu", limit_s) == failed
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert {name: rows[name]["outcome"] for name in gpu_check.PARTS[1]} == dict.fromkeys(
        gpu_check.PARTS[1], "passed"
    )
    assert rows["canary"]["outcome"] == "broke" and "stopped after 0 s" in rows["canary"]["error"]
    assert rows["sync"]["outcome"] == "not run: out of time" and begun == [*gpu_check.PARTS[1], "canary"]
    assert (tmp_path / "gpu_check.md").read_text().count("passed") == len(gpu_check.PARTS[1])


def test_a_row_that_breaks_says_so_and_one_that_misses_its_bar_fails():
    bench = gpu_check.Bench(Ranks(0, 1, torch.device("cpu")), tiny=True)
    broke = gpu_check.checked(lambda bench: 1 / 0, bench)
    assert (broke["outcome"], broke["error"]) == ("broke", "ZeroDivisionError: division by zero")
    failed = gpu_check.checked(lambda bench: {"ratio": 0.5, "passed": False}, bench)
    assert (failed["outcome"], failed["ratio"]) == ("failed", 0.5)
