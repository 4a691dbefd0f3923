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
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL

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


def test_the_quickstart_learns_in_sixty_steps(tmp_path):
    command = [sys.executable, EXAMPLES / "quickstart.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=480, cwd=tmp_path, env=environment(tmp_path, 60)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = async_grpo.TrainResult.read(tmp_path / "outputs" / "quickstart")
    assert [line["step"] for line in result.metrics] == list(range(1, 61))
    before, after = result.evaluations[0], result.evaluations[-1]
    assert after["eval_avg@1"] >= before["eval_avg@1"] + 0.15
    assert "step 60/60 | reward" in done.stdout and "held-out accuracy" in done.stdout.splitlines()[-1]
    assert (result.output_dir / "training.svg").exists() and (result.model / "model.safetensors").exists()


def code_cells() -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_cells_of_the_notebook_run_in_order_while_an_event_loop_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUICKSTART_STEPS", "2")
    # Otherwise with the options of the quickstart above, which runs with vLLM
    monkeypatch.setattr(async_grpo, "train", functools.partial(async_grpo.train, engine="fake"))
    names: dict = {"__name__": "__main__"}

    async def kernel() -> None:
        for cell in code_cells():
            exec(compile(cell, "cell", "exec"), names)

    asyncio.run(kernel())
    assert [line["step"] for line in names["result"].metrics] == [1, 2]


def test_closures_and_functions_in_the_form_of_trl_are_trained_on_and_a_run_goes_on_with_new_ones(tmp_path):
    """Also: children of the program outlive the run, and the same call goes on with other functions of the same names."""
    rows = [json.loads(line) for line in COUNTDOWN_TRAIN.read_text().splitlines()[:16]]
    for row in rows:
        row["prompt"] = row.pop("messages")
        del row["input_token_ids"], row["input"]

    def rewards(weight: float) -> list:
        def length(sample):
            return weight * len(sample["completion"])

        def roles(prompts, completions, target, **columns):
            return [
                float(prompts[0][0]["role"] == "user" and target[0] > 0) for ((message,),) in [completions]
            ]

        return [length, roles]

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    options = SMALL | {
        "output_dir": tmp_path / "run",
        "reward_combine": "sum",
        "dump_samples_filename": "samples.jsonl",
    }
    try:
        first = async_grpo.train(TINY_MODEL, rows, rewards(1.0), **options)
        assert child.poll() is None
        second = async_grpo.train(TINY_MODEL, rows, rewards(-1.0), **(options | {"num_training_batches": 3}))
    finally:
        child.kill()
        child.wait(10)
    assert [len(first.metrics), len(second.metrics)] == [2, 3] and len(second.checkpoints) >= 1
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    for line in samples:
        sign = 1 if line["step"] < 3 else -1
        assert line["reward"] == pytest.approx(1.0 + sign * len(line["completion"]))


INTERRUPTED = """
import sys
import async_grpo
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
try:
    length = lambda sample: len(sample["completion"])
    async_grpo.train(TINY_MODEL, COUNTDOWN_TRAIN, length, output_dir=sys.argv[1], **{options})
except KeyboardInterrupt as interrupt:
    print("interrupted:", interrupt, flush=True)
"""


def test_ctrl_c_ends_the_run_in_order_and_the_program_goes_on(tmp_path):
    code = INTERRUPTED.replace("{options}", repr(SMALL | {"num_training_batches": 10_000}))
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    environment_of_run = environment(tmp_path, 0)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment_of_run) as program:
        metrics, give_up = tmp_path / "run" / "training_metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < give_up:
            assert program.poll() is None
            time.sleep(0.2)
        program.send_signal(signal.SIGINT)
        said = program.communicate(timeout=150)[0]
    assert program.returncode == 0 and "interrupted:" in said and "saved in" in said
    assert async_grpo.TrainResult.read(tmp_path / "run").checkpoints
