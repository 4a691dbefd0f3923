"""A run whose engine lives in another environment (`--engine-python`), and whose own environment has no vLLM.

ENGINE_PYTHON names the Python of that environment; without it the test is skipped. It must have the Ray of this
environment; its vLLM may be another one.
"""

import os
import subprocess
import sys

import pytest
from real_runs import OPTIONS, left_behind, lines

from async_grpo.data import COUNTDOWN_HELDOUT
from async_grpo.inference.engine_python import read_environment

ENGINE_PYTHON = os.environ.get("ENGINE_PYTHON", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not ENGINE_PYTHON, reason="ENGINE_PYTHON names no Python of another environment"),
]
STEPS = 30
# Loaded by every Python that has its folder on the path; it takes vLLM away from those of this environment
HIDE_VLLM = f"""
import sys
from importlib.machinery import PathFinder
if sys.prefix == {sys.prefix!r}:
    find_any = PathFinder.find_spec
    def find_spec(name, *arguments):
        return None if name == "vllm" else find_any(name, *arguments)
    PathFinder.find_spec = staticmethod(find_spec)
"""


def test_weights_are_proven_and_the_reward_rises_across_environments(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE_VLLM)
    folder = tmp_path / "run"
    options = OPTIONS | {
        "output-dir": folder,
        "run-name": tmp_path.name,
        "engine-python": ENGINE_PYTHON,
        "eval-data-path": COUNTDOWN_HELDOUT,
        "batch-size": 32,
        "max-tokens-per-gpu": 4096,
        "learning-rate": 2e-4,
        "num-training-batches": STEPS,
    }
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    path = os.pathsep.join(filter(None, [str(hidden), os.environ.get("PYTHONPATH", "")]))
    variables = {**os.environ, "PYTHONPATH": path, "RUN_MARK": str(folder)}
    imported = subprocess.run([sys.executable, "-c", "import vllm"], env=variables, capture_output=True)
    assert imported.returncode == 1  # vLLM is hidden here
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    engines = read_environment(ENGINE_PYTHON)
    logs = "".join(log.read_text() for log in (folder / "logs").glob("generation-*.log"))
    assert f"vLLM's engine is up: vLLM {engines.vllm_version}, torch {engines.versions['torch']}," in logs
    steps = lines(folder)
    assert [step["step"] for step in steps] == [*range(1, STEPS + 1)]
    assert steps[0]["mismatch_kl"] < 1e-8 and abs(steps[0]["ratio_max"] - 1) < 1e-4
    assert all(step["canary_error"] < 1e-4 and step["alarms"] == [] for step in steps)
    assert steps[0]["avg_kl_div"] < 1e-8 < steps[-1]["avg_kl_div"]
    before, after = lines(folder, "eval_metrics.jsonl")
    assert after["eval_avg_reward"] > before["eval_avg_reward"] + 0.1
    assert left_behind(folder) == []
