"""The only engine of a run is killed: its dispatcher starts another, which is given the weights of the day."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
from test_resume_real import lines, wait_for_step
from test_whole_chain import OPTIONS, left_behind

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
STEPS = 12


def engine_of(run: subprocess.Popen) -> psutil.Process:
    family = psutil.Process(run.pid).children(recursive=True)
    (engine,) = [one for one in family if "ray::GenerationActor" in " ".join(one.cmdline())]
    return engine


def test_a_run_whose_only_engine_is_killed_goes_on_with_a_new_one(tmp_path):
    folder = tmp_path / "run"
    own = {"output-dir": folder, "run-name": tmp_path.name, "num-training-batches": STEPS, "kl-coef": 0}
    more = {"nproc-per-node": 1, "reward-fns": "format", "verifiers": "format=1"}
    command = [sys.executable, "-m", "async_grpo", "run", "--engine=fake"]
    command += [f"--{name}={value}" for name, value in (OPTIONS | own | more).items()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen(command, env={**os.environ, "RUN_MARK": str(tmp_path)}, **pipes)
    try:
        wait_for_step(folder, 2, run)
        first = engine_of(run)
        first.send_signal(signal.SIGKILL)
        said, _ = run.communicate(timeout=200)
        assert run.returncode == 0, said
        dispatcher = (folder / "logs" / "generation-worker-0.log").read_text()
        assert "it is started again in 5 s (1 of --engine-restarts 3)" in dispatcher
        assert "ALARM generation worker generation-" in said and "was lost" in said
    finally:
        run.kill()
    assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 1))
    assert all(line["samples_in_batch"] == 64 for line in lines(folder)) and left_behind(tmp_path) == []
