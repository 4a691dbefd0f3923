"""Programs started by hand on a Ray cluster: workers outlive their trainer, serve the next one, and drain when told."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from real_runs import DATA, OPTIONS, left_behind, lines, wait_for_step

from async_grpo.launch import process_variables
from async_grpo.training.checkpoint_folder import newest

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
STEPS = 400


def said(log: Path, text: str, within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < give_up, (
            f"{log} does not say {text!r}:\n{log.read_text(errors='replace')[-3000:]}"
        )
        time.sleep(0.1)


def actors_of(run: Path) -> set[int]:
    """Of this run alone: other tests run beside it."""
    return {
        process.pid
        for process in psutil.process_iter(["cmdline", "environ"])
        if "ray::GenerationActor" in str(process.info["cmdline"])
        and (process.info["environ"] or {}).get("RUN_MARK") == str(run)
    }


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Not pytest's own folder: its name is too long for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="rejoin-") as folder:
        yield Path(folder)


@pytest.mark.exhaustive
def test_workers_outlive_a_killed_trainer_serve_the_next_and_drain_when_told(tmp_path, scratch):
    folder = tmp_path / "run"
    variables = process_variables.run_environment("", 1, scratch / "up", tmp_path)
    variables |= {"RUN_MARK": str(tmp_path)}
    (scratch / "up").touch()
    programs: list[subprocess.Popen] = []

    def start(name: str, *command: str) -> subprocess.Popen:
        with (tmp_path / f"{name}.log").open("ab") as log:
            done = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        programs.append(done)
        return done

    def trainer() -> subprocess.Popen:
        own = {"output-dir": folder, "run-name": tmp_path.name, "num-training-batches": STEPS, "kl-coef": 0}
        own |= {
            "reward-fns": "format",
            "verifiers": "format=1",
            "checkpoint-every-s": 1,
            "worker-grace-s": 100,
        }
        own |= {"weight-transport": "shared_files", "weight-folder": tmp_path / "weights"}
        options = {name: value for name, value in (OPTIONS | own).items() if name != "nproc-per-node"}
        return start(
            "trainer", *program("trainer"), *(f"--{name}={value}" for name, value in options.items())
        )

    def program(name: str) -> list[str]:
        return [sys.executable, "-u", "-m", f"async_grpo.launch.{name}"]

    joined = r"starting worker (generation-\w+)"
    try:
        start("ray", *process_variables.ray_command(variables["RAY_ADDRESS"], scratch))
        said(tmp_path / "ray.log", "Ray runtime started")
        options = [f"--run-name={tmp_path.name}", f"--model-path={DATA / 'tiny-model'}", "--engine=fake"]
        workers = [start(f"worker{n}", *program("worker"), "--mode=generation", *options) for n in range(2)]
        first = trainer()
        while newest(folder) is None:
            assert first.poll() is None, (tmp_path / "trainer.log").read_text()
            time.sleep(0.1)
        for number in range(2):  # one alone may have served until now
            said(tmp_path / f"worker{number}.log", "has joined")
        actors = actors_of(tmp_path)
        first.send_signal(signal.SIGSTOP)
        time.sleep(2)  # an update that is under way ends: else its worker would have to load again
        first.send_signal(signal.SIGKILL)
        for number in range(2):
            said(tmp_path / f"worker{number}.log", "the worker waits 300 s for it (--rejoin-s)")
        second = trainer()
        said(tmp_path / "trainer.log", "resumed after step")
        wait_for_step(folder, len(lines(folder)) + 5, second)
        now = actors_of(tmp_path)
        logs = "".join((tmp_path / f"worker{number}.log").read_text() for number in range(2))
        assert now == actors and len(actors) == 2, logs  # nothing was loaded again
        names = re.findall(joined, (tmp_path / "worker0.log").read_text())
        assert len(set(names)) == 2  # it joined under another name

        workers[0].send_signal(signal.SIGTERM)
        assert workers[0].wait(60) == 0
        assert (
            f"worker {names[1]} has drained: it was told to end, " in (tmp_path / "worker0.log").read_text()
        )
        wait_for_step(folder, len(lines(folder)) + 3, second)  # the other one goes on
        second.send_signal(signal.SIGTERM)
        assert second.wait(60) == 75 and workers[1].wait(60) == 0
        assert "the run is over" in (tmp_path / "worker1.log").read_text()
        assert [line["step"] for line in lines(folder)] == list(range(1, len(lines(folder)) + 1))
    finally:
        for one in reversed(programs):
            one.kill() if one is not programs[0] else one.terminate()
        programs[0].wait(30)
    give_up = time.monotonic() + 20
    while (left := left_behind(tmp_path)) and time.monotonic() < give_up:
        time.sleep(0.5)
    assert left == []
