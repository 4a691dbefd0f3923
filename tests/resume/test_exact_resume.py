"""A run that is killed at any moment and started again ends with the weights of one that never was, bit for bit.

RANDOM_KILLS=50 pytest tests/resume/test_exact_resume.py    kills so often instead of a few times; about an hour
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from async_grpo.launch.process_variables import free_port

HELPERS = Path(__file__).parents[1] / "helpers"
STEPS = 12
DEADLINE_S = 180.0  # that a run which hangs is given; on a busy machine an honest one takes a minute


def start(folder: Path, staleness: int, ranks: int) -> list[subprocess.Popen]:
    port = free_port()
    paths = os.pathsep.join([str(HELPERS), str(HELPERS.parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    folder.mkdir(exist_ok=True)
    (folder / "messages").unlink(missing_ok=True)
    command = [sys.executable, str(HELPERS / "scripted_run.py"), str(folder), str(staleness), str(STEPS)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(ranks)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors[-3000:]


def kill_at_random(processes: list[subprocess.Popen], folder: Path, chance: random.Random) -> None:
    """SIGKILL all: one time in five at any moment of the start, else after the first checkpoint of this start."""
    begun, at_start = time.monotonic(), chance.random() < 0.2
    old = set((folder / "model" / "out" / "checkpoints").glob("step_*"))
    while not at_start and set((folder / "model" / "out" / "checkpoints").glob("step_*")) <= old:
        if all(process.poll() is not None for process in processes):
            break
        assert time.monotonic() - begun < DEADLINE_S
        time.sleep(0.02)
    time.sleep(chance.uniform(0, 8.0 if at_start else 0.7))
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()


def weights(folder: Path):
    exported = folder / "model" / "out" / "hf_format"
    (last,) = exported.glob(f"samples_{STEPS * 8}")
    return load_file(last / "model.safetensors")


CASES = [(0, 1, 1), (1, 1, 1), (2, 2, 1)]  # staleness, ranks, kills
if KILLS := int(os.environ.get("RANDOM_KILLS", 0)):
    CASES = [(staleness, ranks, KILLS) for staleness in (0, 1, 2) for ranks in (1, 2)]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("staleness", "ranks", "kills"), CASES)
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(tmp_path, staleness, ranks, kills):
    finish(start(tmp_path / "whole", staleness, ranks))
    expected, chance = weights(tmp_path / "whole"), random.Random(staleness + 10 * ranks)
    for number in range(max(1, kills // 5)):  # a run lasts for some kills
        folder = tmp_path / f"killed_{number}"
        for _ in range(min(kills, 5)):
            kill_at_random(start(folder, staleness, ranks), folder, chance)
        finish(start(folder, staleness, ranks))
        found = weights(folder)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.tobytes() == found[name].tobytes(), name
