"""Runs of the whole chain (Ray, vLLM, FSDP) as processes: their options, what they wrote, what they left behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "sample-data"
OPTIONS = {
    "model-name-or-path": DATA / "tiny-model",
    "data-path": DATA / "countdown_train.jsonl",
    "reward-fns": "countdown,format",
    "verifiers": "countdown=2",  # one reward in processes, one without
    "batch-size": 8,
    "samples-per-question": 8,
    "max-tokens-per-gpu": 512,
    "max-generation-tokens": 24,
    "learning-rate": 1e-3,
    "num-warmup-steps": 0,
    "kl-coef": 0.001,
    "nproc-per-node": 2,
    "start-timeout-s": 240,
    "experience-timeout-s": 120,
    "dump-samples-filename": "samples.jsonl",
}


def start_run(folder: Path, options: Mapping[str, Any]) -> subprocess.Popen:
    """Start a run that writes into the folder. Its RUN_MARK, which `left_behind` looks for, is the folder."""
    named = {**options, "output-dir": folder, "run-name": folder.name}
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
    for name, value in named.items():
        command.append(f"--{name}" if value is True else f"--{name}={value}")
    return subprocess.Popen(
        command,
        env={**os.environ, "RUN_MARK": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_behind(folder: Path) -> list[str]:
    """Return the command lines of processes that outlived the run in `folder`.

    They have its RUN_MARK in their environment, or are reward processes whose parent has died.
    """
    left = []
    for process in psutil.process_iter(["cmdline", "ppid", "environ"]):
        line = " ".join(process.info["cmdline"] or [])
        marked = (process.info["environ"] or {}).get("RUN_MARK") == str(folder)
        if marked or ("async_grpo.rewards.isolation.child" in line and process.info["ppid"] == 1):
            left.append(line[:150])
    return left


def lines(folder: Path, name: str = "training_metrics.jsonl") -> list[dict]:
    """Return what a run has written to one of its JSON-lines files."""
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(folder: Path, step: int, run: subprocess.Popen) -> None:
    """Wait until a run has done a step; fail with its output if it ends before."""
    give_up = time.monotonic() + 200
    while len(lines(folder)) < step:
        assert run.poll() is None and time.monotonic() < give_up, run.communicate()[0]
        time.sleep(0.1)
