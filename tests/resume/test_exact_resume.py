"""A run that is killed at any moment and started again ends with the weights of one that never was, bit for bit.

RANDOM_KILLS=50 pytest tests/resume/test_exact_resume.py    kills so often instead of a few times; about an hour
"""

import os
import random
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import scripted_run
from forked import FORKED
from safetensors.numpy import load_file
from tiny_flow import NEEDS_DIFFUSERS

from async_grpo.launch.process_variables import free_port

STEPS = 12
START_S = 2.0  # that a run takes, at most, until it has begun to train
DEADLINE_S = 180.0  # that a run which hangs is given; on a busy machine an honest one takes a minute


def start(folder: Path, staleness: int, ranks: int, lora_rank: int, passes: int) -> list[BaseProcess]:
    port = free_port()
    folder.mkdir(exist_ok=True)
    (folder / "messages").unlink(missing_ok=True)
    processes = []
    for rank in range(ranks):
        args = (port, folder, staleness, rank, ranks, lora_rank, passes)
        processes.append(FORKED.Process(target=run_rank, args=args, name=str(rank)))
    for process in processes:
        process.daemon = True  # it ends with this process
        process.start()
    return processes


def start_alone(work: Callable[[Path, int], None], folder: Path) -> list[BaseProcess]:
    """Start, or continue, a run of one rank: `scripted_run.draw` or `scripted_run.see`."""
    folder.mkdir(exist_ok=True)
    process = FORKED.Process(target=run_alone, args=(work, folder), name="0")
    process.daemon = True
    process.start()
    return [process]


def run_alone(work: Callable[[Path, int], None], folder: Path) -> None:
    with (folder / "errors-0.txt").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    work(folder, STEPS)


def run_rank(
    port: int, folder: Path, staleness: int, rank: int, world_size: int, lora_rank: int, passes: int
) -> None:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with (folder / f"errors-{rank}.txt").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    scripted_run.main(folder, staleness, STEPS, rank, world_size, lora_rank, passes)


def finish(processes: list[BaseProcess], folder: Path) -> None:
    for process in processes:
        process.join(DEADLINE_S)
        errors = folder / f"errors-{process.name}.txt"
        assert process.exitcode == 0, (process.exitcode, errors.read_text()[-3000:])


def kill_at_random(processes: list[BaseProcess], folder: Path, chance: random.Random) -> None:
    """SIGKILL all: one time in five at any moment of the start, else after the first checkpoint of this start."""
    begun, at_start = time.monotonic(), chance.random() < 0.2
    old = set((out_of(folder) / "checkpoints").glob("step_*"))
    while not at_start and set((out_of(folder) / "checkpoints").glob("step_*")) <= old:
        if not any(process.is_alive() for process in processes):
            break
        assert time.monotonic() - begun < DEADLINE_S
        time.sleep(0.02)
    time.sleep(chance.uniform(0, START_S if at_start else 0.7))
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def out_of(folder: Path) -> Path:
    """Return the output folder of a run; a run that draws has it beside its model."""
    beside = folder / "out"
    return beside if beside.exists() else folder / "model" / "out"


def weights(folder: Path):
    exported = out_of(folder) / "hf_format"
    (last,) = exported.glob(f"samples_{STEPS * 8}")
    # The model, the adapter, or the transformer of a model that draws
    (file,) = [*last.glob("*.safetensors"), *last.glob("transformer/*.safetensors")]
    return load_file(file)


# Staleness, ranks, kills, rank of a LoRA adapter (0: all weights are trained), passes over each batch
CASES = [
    pytest.param(0, 1, 1, 0, 1, marks=pytest.mark.exhaustive),
    pytest.param(1, 1, 1, 0, 1, marks=pytest.mark.exhaustive),
    (2, 2, 1, 0, 1),
    pytest.param(1, 2, 2, 4, 1, marks=pytest.mark.exhaustive),
    pytest.param(3, 1, 2, 0, 2, marks=pytest.mark.exhaustive),
    pytest.param(7, 2, 1, 0, 2, marks=pytest.mark.exhaustive),
]
if KILLS := int(os.environ.get("RANDOM_KILLS", 0)):
    CASES = [
        (staleness, ranks, KILLS, lora_rank, passes)
        for staleness, passes in ((0, 1), (1, 1), (2, 1), (3, 2), (7, 2))
        for ranks in (1, 2)
        for lora_rank in (0, 4)
    ]


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("staleness", "ranks", "kills", "lora_rank", "passes"), CASES)
def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(
    tmp_path, staleness, ranks, kills, lora_rank, passes
):
    finish(start(tmp_path / "whole", staleness, ranks, lora_rank, passes), tmp_path / "whole")
    expected, chance = weights(tmp_path / "whole"), random.Random(staleness + 10 * ranks)
    assert all("lora_" in name for name in expected) == bool(lora_rank)
    for number in range(max(1, kills // 5)):  # a run lasts for some kills
        folder = tmp_path / f"killed_{number}"
        for _ in range(min(kills, 5)):
            kill_at_random(start(folder, staleness, ranks, lora_rank, passes), folder, chance)
        finish(start(folder, staleness, ranks, lora_rank, passes), folder)
        found = weights(folder)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.tobytes() == found[name].tobytes(), name


def ends_as_one_that_was_not(work: Callable[[Path, int], None], tmp_path: Path) -> None:
    """Kill a run of one rank at three moments, and compare its weights with those of one that was not killed."""
    finish(start_alone(work, tmp_path / "whole"), tmp_path / "whole")
    expected = weights(tmp_path / "whole")
    chance = random.Random(2)
    folder = tmp_path / "killed"
    for _ in range(3):
        kill_at_random(start_alone(work, folder), folder, chance)
    finish(start_alone(work, folder), folder)
    resumed = weights(folder)
    assert resumed.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.tobytes() == resumed[name].tobytes(), name


@pytest.mark.exhaustive
@NEEDS_DIFFUSERS
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by_nft", [False, True])
def test_a_run_that_draws_and_is_killed_at_three_moments_ends_as_one_that_was_not(tmp_path, by_nft):
    ends_as_one_that_was_not(partial(scripted_run.draw, by_nft=by_nft), tmp_path)


@pytest.mark.timeout(600)
def test_a_run_whose_prompts_have_images_and_is_killed_at_three_moments_ends_as_one_that_was_not(tmp_path):
    ends_as_one_that_was_not(scripted_run.see, tmp_path)
    # No image is left after the last step, whichever start of the run has written it
    for run in (tmp_path / "whole", tmp_path / "killed"):
        assert not [path for path in (run / "out" / "images").iterdir() if not path.name.startswith(".")]
