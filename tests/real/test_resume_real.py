"""A run on real parts (Ray, vLLM, FSDP ranks) that is told to end, or killed, or out of time, goes on where it was."""

import signal
import subprocess
import time
from pathlib import Path

import pytest
from long_tests import long_test
from real_runs import OPTIONS, left_behind, lines, start_run, wait_for_step

from async_grpo.training.checkpoint_folder import newest

pytestmark = [pytest.mark.real, pytest.mark.timeout(500)]
STEPS, GROUPS = 20, 64


def start(folder: Path, **changes) -> subprocess.Popen:
    options = {
        "num-training-batches": STEPS,
        "checkpoint-every-s": 1,
        "kl-coef": 0,  # processes less at each of its starts
        "nproc-per-node": 1,
        # One sample per question, with a critic of its own that is resumed, too
        "batch-size": GROUPS,
        "samples-per-question": 1,
        "advantage-estimator": "gae",
        "critic-model": "same",
        "critic-warmup-steps": 2,
    }
    return start_run(folder, OPTIONS | options | changes)


def check_whole(folder: Path) -> None:
    """Every step has one line; every prompt was trained once, in the order of its step, none skipped."""
    assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 1))
    trained = lines(folder, "samples.jsonl")
    assert len(trained) == STEPS * GROUPS
    of_step: dict[int, set[int]] = {}
    for sample in trained:
        of_step.setdefault(sample["step"], set()).add(sample["group"])
    assert [sorted(of_step[step]) for step in sorted(of_step)] == [
        list(range(step * GROUPS, (step + 1) * GROUPS)) for step in range(STEPS)
    ]


def kill_after_a_step(folder: Path, step: int) -> None:
    """Start the run, which goes on from there, and kill it after another checkpoint."""
    killed = start(folder, engine="fake")
    while newest(folder)[1].step <= step:
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.1)
    killed.kill()
    said, _ = killed.communicate()
    assert f"resumed after step {step}" in said, said
    give_up = time.monotonic() + 30
    while left_behind(folder) and time.monotonic() < give_up:
        time.sleep(0.5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_killed", [False, pytest.param(True, marks=long_test("three minutes"))])
def test_a_run_told_to_end_then_killed_then_out_of_time_goes_on_each_time_from_where_it_was(
    tmp_path, is_killed
):
    """Without LONG_TESTS=1 it is not killed: tests/real/test_rejoin_real.py kills a trainer, which another one follows."""
    told = start(tmp_path, engine="fake")  # which starts sooner; the last one is vLLM
    wait_for_step(tmp_path, 5, told)
    told.send_signal(signal.SIGTERM)
    said, _ = told.communicate(timeout=90)
    assert told.returncode == 75 and "the same command goes on from there" in said, said
    assert left_behind(tmp_path) == []
    _, manifest = newest(tmp_path)
    assert manifest.ended == "SIGTERM" and manifest.step >= 5, said

    if is_killed:
        kill_after_a_step(tmp_path, manifest.step)
    step = newest(tmp_path)[1].step

    timed = start(tmp_path, **{"max-hours": 0.0005, "engine": "fake", "nproc-per-node": 2})
    said, _ = timed.communicate(timeout=300)
    assert timed.returncode == 75 and "--max-hours" in said, said
    assert f"resumed after step {step}" in said, said
    _, manifest = newest(tmp_path)
    assert manifest.ended.startswith("--max-hours")  # by two ranks, the other of which has less to do

    again = start(tmp_path)
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0 and f"resumed after step {manifest.step}" in said, said
    check_whole(tmp_path)
    once_more = start(tmp_path)
    said, _ = once_more.communicate(timeout=60)
    assert once_more.returncode == 0 and f"complete: {STEPS} steps are done" in said, said
