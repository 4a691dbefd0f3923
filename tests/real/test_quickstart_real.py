"""The quickstart as a program, the notebook as cells in a running event loop, and what a run does with given functions."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import async_grpo

pytestmark = [pytest.mark.real, pytest.mark.timeout(500)]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text())
SMALL = {
    "batch_size": 4,
    "samples_per_question": 4,
    "num_training_batches": 2,
    "max_generation_tokens": 24,
    "max_tokens_per_gpu": 1024,
    "learning_rate": 1e-3,
    "num_warmup_steps": 0,
    "enforce_eager": True,
    "verifiers_per_reward": 1,
    "start_timeout_s": 240,
    "engine": "fake",  # starts sooner than vLLM, with which the quickstart runs
}


def environment(folder: Path, steps: int) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "QUICKSTART_STEPS": str(steps)}


def run_quickstart(folder: Path, steps: int) -> tuple[str, async_grpo.TrainResult]:
    """Run it for so many steps, check what it writes, and return its output and its result."""
    command = [sys.executable, EXAMPLES / "quickstart.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=480, cwd=folder, env=environment(folder, steps)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = async_grpo.TrainResult.read(folder / "outputs" / "quickstart")
    assert [line["step"] for line in result.metrics] == list(range(1, steps + 1))
    assert f"step {steps}/{steps} | reward" in done.stdout
    assert (result.output_dir / "training.svg").exists() and (result.model / "model.safetensors").exists()
    return done.stdout, result


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, async_grpo.TrainResult]:
    return run_quickstart(tmp_path_factory.mktemp("quickstart"), 3)


def test_the_quickstart_runs_and_tells_the_held_out_accuracy(quickstart):
    output, result = quickstart
    assert "held-out accuracy" in output.splitlines()[-1]
    assert [line["eval_avg@1"] >= 0 for line in result.evaluations] == [True, True]


@pytest.mark.exhaustive
def test_the_quickstart_learns_in_forty_steps(tmp_path):
    _, result = run_quickstart(tmp_path, 40)
    before, after = result.evaluations[0], result.evaluations[-1]
    assert after["eval_avg@1"] >= before["eval_avg@1"] + 0.15


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run_cells() -> dict:
    """Run the cells of the notebook in a running event loop, and return the names that they define."""
    names: dict = {"__name__": "__main__"}

    async def kernel() -> None:
        for cell in code_cells():
            exec(compile(cell, "cell", "exec"), names)

    asyncio.run(kernel())
    return names


def test_the_cells_of_the_notebook_run_in_order_and_show_what_a_run_has_written(
    quickstart, tmp_path, monkeypatch
):
    """Their call of `train` is checked as a dry run; then the quickstart above has made its files."""
    _, result = quickstart
    real_train = async_grpo.train
    dry_runs = []

    def train(*arguments, **options) -> async_grpo.TrainResult:
        dry_runs.append(real_train(*arguments, **options, dry_run=True))
        return result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(async_grpo, "train", train)
    assert run_cells()["before"] == result.evaluations[0]["eval_avg@1"] and len(dry_runs) == 1


@pytest.mark.exhaustive
def test_the_cells_of_the_notebook_train_while_an_event_loop_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUICKSTART_STEPS", "2")
    # Otherwise with the options of the quickstart above, which runs with vLLM
    monkeypatch.setattr(async_grpo, "train", functools.partial(async_grpo.train, engine="fake"))
    assert [line["step"] for line in run_cells()["result"].metrics] == [1, 2]


PROGRAM = """
import json
import subprocess
import sys
from pathlib import Path

import async_grpo
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL

rows = [json.loads(line) for line in COUNTDOWN_TRAIN.read_text().splitlines()[:16]]
for row in rows:
    row["prompt"] = row.pop("messages")
    del row["input_token_ids"], row["input"]


def rewards(weight):
    def length(sample):
        return weight * len(sample["completion"])

    def roles(prompts, completions, target, **columns):
        return [float(prompts[0][0]["role"] == "user" and target[0] > 0) for ((message,),) in [completions]]

    return [length, roles]


options = {options} | {"output_dir": sys.argv[1], "reward_combine": "sum", "dump_samples_filename": "samples.jsonl"}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
try:
    async_grpo.train(TINY_MODEL, rows, rewards(1.0), **(options | {"num_training_batches": 10_000}))
except KeyboardInterrupt as interrupt:
    print("interrupted:", interrupt, flush=True)
first = async_grpo.TrainResult.read(Path(sys.argv[1]))
done = len(first.metrics)
second = async_grpo.train(TINY_MODEL, rows, rewards(-1.0), **(options | {"num_training_batches": done + 3}))
print(json.dumps([len(first.checkpoints), done, len(second.metrics), child.poll()]))
child.kill()
"""


@pytest.mark.exhaustive
def test_ctrl_c_ends_a_run_in_order_and_the_program_goes_on_with_it_and_with_new_functions_of_the_same_names(
    tmp_path,
):
    """The functions are closures and of TRL's form. A child of the program outlives both calls."""
    program_of = PROGRAM.replace("{options}", repr(SMALL))
    command = [sys.executable, "-c", program_of, str(tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment(tmp_path, 0), **pipes) as program:
        metrics, give_up = tmp_path / "run" / "training_metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < give_up:
            assert program.poll() is None
            time.sleep(0.2)
        program.send_signal(signal.SIGINT)
        said = program.communicate(timeout=200)[0]
    assert program.returncode == 0 and "interrupted:" in said and "saved in" in said
    num_checkpoints, first_steps, all_steps, child_ended = json.loads(said.splitlines()[-1])
    assert num_checkpoints >= 1 and first_steps >= 1 and all_steps == first_steps + 3
    assert child_ended is None
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {line["step"] for line in samples} == set(range(1, all_steps + 1))
    # What was scored before the interruption and not yet trained on keeps its reward
    allowed_weights = {step: {1.0, -1.0} for step in range(first_steps + 1, all_steps)}
    allowed_weights |= {step: {1.0} for step in range(1, first_steps + 1)} | {all_steps: {-1.0}}
    for line in samples:
        weight = (line["reward"] - 1.0) / max(len(line["completion"]), 1)
        assert not line["completion"] or weight in allowed_weights[line["step"]], line
