"""Stalls on real parts (Ray, two FSDP ranks) are named, shown by `why`, and the run goes on to its end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from real_runs import OPTIONS, left_behind, lines, wait_for_step

from async_grpo.metrics.watchdog import stalls_of
from async_grpo.metrics.writer import holder

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
STEPS = 40  # more than are done until the last question, and each is quick
PAGE = """
import os

def patient(sample, *, flag="none"):
    while os.path.exists(flag):
        pass
    return float(len(sample["completion"]) % 7)
"""


def start(folder: Path, flag: Path) -> subprocess.Popen:
    (folder / "page.py").write_text(PAGE)
    own = {
        "output-dir": folder / "run",
        "run-name": folder.name,
        "num-training-batches": STEPS,
        "reward-fns": f"{folder / 'page.py'}:patient",
        "reward-options": f"flag={flag}",
        "verifiers": "patient=2",
        "reward-timeout-s": 60,
        "stall-s": 5,
        "kl-coef": 0,
        "engine": "fake",  # starts sooner than vLLM; its actor is stopped as that of vLLM would be
    }
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in (OPTIONS | own).items()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**os.environ, "RUN_MARK": str(folder)}, **pipes)


def said_with(expected: str, folder: Path, run: subprocess.Popen) -> str:
    """The text whose first sentence says that."""
    give_up = time.monotonic() + 60
    while True:
        for text in stalls_of(folder).values():
            if expected in text.splitlines()[0]:
                return text
        texts = list(stalls_of(folder).values())[:1]
        assert run.poll() is None and time.monotonic() < give_up, (expected, texts, len(lines(folder)))
        time.sleep(0.2)


@pytest.mark.exhaustive
def test_an_endless_verifier_a_stopped_engine_and_a_question_are_told_and_the_run_ends_well(tmp_path):
    flag, folder = tmp_path / "flag", tmp_path / "run"
    run = start(tmp_path, flag)
    try:
        wait_for_step(folder, 2, run)

        flag.touch()
        text = said_with("The verifier patient owes a verdict", folder, run)
        assert "the process of a verifier (process" in text.splitlines()[0], text
        assert "may be in an endless loop" in text.splitlines()[0], text
        assert (
            "the engine (process" in text and "the controller (process" in text and "rank 1 (process" in text
        )
        flag.unlink()
        wait_for_step(folder, len(lines(folder)) + 1, run)

        family = psutil.Process(run.pid).children(recursive=True)
        (engine,) = [one for one in family if "ray::GenerationActor" in " ".join(one.cmdline())]
        engine.send_signal(signal.SIGSTOP)
        try:
            text = said_with(f"The engine (process {engine.pid}) is stopped, as by SIGSTOP", folder, run)
        finally:
            engine.send_signal(signal.SIGCONT)
        (named,) = [place for place, one in stalls_of(folder).items() if one == text]
        stacks = (named / "stacks.txt").read_text()
        assert "rank 0 (process" in stacks and "run (async_grpo/training/trainer.py" in stacks
        assert (named / "logs.txt").read_text().startswith("== ")
        wait_for_step(folder, len(lines(folder)) + 1, run)

        assert holder(folder) == run.pid
        before = set(stalls_of(folder))
        run.send_signal(signal.SIGUSR1)
        give_up = time.monotonic() + 30
        while set(stalls_of(folder)) == before:
            assert run.poll() is None and time.monotonic() < give_up
            time.sleep(0.2)
        command = [sys.executable, "-m", "async_grpo", "why", str(folder)]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        assert f"The engine (process {engine.pid}) is stopped" in shown and "Who waits for whom:" in shown

        said, _ = run.communicate(timeout=200)
        assert run.returncode == 0, said
        assert "The verifier patient owes a verdict" in said  # on the console, too
        assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 1))
        assert all(line["num_reward_ok"] == 64 for line in lines(folder))
    finally:
        run.kill()
    assert left_behind(tmp_path) == []
