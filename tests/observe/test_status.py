"""`async-grpo status` tells from a run's files what it does, and whether it runs, ended or died; large files too."""

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from async_grpo.errors import ConfigurationError
from async_grpo.metrics import tail
from async_grpo.metrics.tail import last_lines, last_records
from async_grpo.observe.run_view import RunView
from async_grpo.observe.status import StatusConfig, status, view


@given(
    st.lists(st.text("ab\u20ac ", max_size=9), max_size=12),
    st.integers(1, 9),
    st.integers(1, 7),
    st.booleans(),
)
def test_the_last_lines_are_those_of_the_whole_file_however_it_is_read(
    tmp_path_factory, lines, count, chunk, open_end
):
    path = tmp_path_factory.mktemp("tail") / "x"
    path.write_text("".join(f"{line}\n" for line in lines) + "unfinished" * open_end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "CHUNK", chunk)
        assert last_lines(path, count) == lines[-count:]


def run_folder(folder, steps, **more):
    options = {
        "samples_per_question": 8,
        "batch_size": 4,
        "train_minibatch_size": None,
        "num_training_batches": 100,
    }
    (folder / "training_params.json").write_text(json.dumps(options))
    now = time.time()
    lines = [
        {
            "step": step,
            "timestamp": now - 2 * (steps - step),
            "avg_reward": 0.5,
            "staleness_mean": 1.0,
            "seconds_computing": 0.75,
            "time_per_batch": 2.0,
            "verifiers": {"math": {"ok": 30, "failed": 2, "latency_p50_s": 0.25, "queue_depth": 5}},
            "alarms": ["math: 2 of 32 calls failed"],
        }
        | more
        for step in range(1, steps + 1)
    ]
    (folder / "training_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def shown(folder) -> str:
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    console.print(view(RunView(folder)))
    return console.export_text()


def test_a_run_that_works_shows_step_pace_time_left_rewards_and_alarms(tmp_path):
    run_folder(tmp_path, 10)
    (tmp_path / ".lock").write_text(str(os.getpid()))
    told = {"step": 8, "eval_avg_reward": 0.25, "eval_avg_reward_ci": 0.125}
    (tmp_path / "eval_metrics.jsonl").write_text(json.dumps(told) + "\n")
    text = shown(tmp_path)
    assert "300      20" in text and "rewards of 10 steps" in text  # 30 and 2 of each step
    for word in ("step 10 of 100, running", "2.00 s a step, 0:03:00 left", "0.75", "reward 0.500", "0.250"):
        assert word in text, text
    assert "ALARM math: 2 of 32 calls failed" in text and "mean reward 0.250 +- 0.125" in text


def test_a_run_that_ended_says_how(tmp_path):
    run_folder(tmp_path, 10)
    (tmp_path / ".lock").write_text("999999999")
    assert "ended, without a checkpoint" in shown(tmp_path)
    assert "step 100 of 100, complete" in shown(run_folder(tmp_path, 100))


def test_before_its_first_step_a_run_shows_the_end_of_its_log(tmp_path):
    run_folder(tmp_path, 0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer.log").write_text("waiting for workers to load\n")
    assert "waiting for workers to load" in shown(tmp_path)


def test_a_hundred_thousand_lines_are_shown_at_once(tmp_path):
    run_folder(tmp_path, 1, padding="x" * 1000)
    line = (tmp_path / "training_metrics.jsonl").read_text()
    with (tmp_path / "training_metrics.jsonl").open("a") as file:
        for _ in range(100):
            file.write(line * 1000)
    begun = time.process_time()
    assert len(last_records(tmp_path / "training_metrics.jsonl", 20)) == 20
    assert time.process_time() - begun < 0.2


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="holds no run"):
        status(StatusConfig(path=str(tmp_path)))


def test_the_memory_of_each_process_stands_beside_its_plan(tmp_path):
    entry = {"peak_GB": 1.5, "added_GB": 1.0, "planned_GB": 2.0}
    memory = {"trainer rank 0": entry, "g0": entry | {"planned_GB": 0.0}, "odd": {"peak_GB": "x"}}
    text = " ".join(shown(run_folder(tmp_path, 3, memory=memory)).split())
    assert (
        "peak memory in GB: trainer rank 0: 1.50 (1.00 since it began to load the model; planned: 2.00), g0: "
        in text
    )
    assert "g0: 1.50 (1.00 since it began to load the model)" in text and "odd" not in text
