"""The loop's order of calls, with fakes that follow a script, and the ranks' life around it."""

import dataclasses
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from unittest.mock import ANY, Mock, call

import psutil
import pytest
import torch

from async_grpo.errors import ConfigurationError, OutOfMemory, WeightsDidNotLand
from async_grpo.messages import StepEnd, WorkersJoined, dummy_micro_batch
from async_grpo.metrics.memory_report import memory_entry
from async_grpo.training.distributed import distributed_run
from async_grpo.training.trainer import Trainer

BATCH = dummy_micro_batch(token_id=1)


def script_of(*micro_batches_per_step):
    """Every role of the trainer at once: remembers who was asked for what."""
    script, messages = Mock(), []
    for step, count in enumerate(micro_batches_per_step, start=1):
        messages += [*[BATCH] * count, StepEnd(step, 2, 8 * step, stats={"avg_reward": 0.5 * step})]
    script.next_message.side_effect = messages
    script.finish.return_value = {"grad_norm": 1.5}
    script.publish.return_value, script.proof.return_value = script.proof, {"weight_sync_s": 0.25}
    script.after_step.side_effect = lambda step: {"heldout_reward": 0.1 * step}
    return script


def lines_of(script):
    return [written.args[0] for written in script.write.call_args_list]


def trainer(script, ranks, num_steps, **options):
    roles = dict.fromkeys(("accumulator", "source", "publisher", "exporter"), script)
    roles |= {"write": script.write, "after_step": script.after_step, **options}
    return Trainer(policy="the policy", ranks=ranks, num_steps=num_steps, **roles)


def test_two_steps_in_order_and_a_line_of_what_every_room_had_to_say(ranks):
    script = script_of(3, 1)
    trainer(script, ranks, 2).run()
    taken, policy, proven = [call.next_message(0), call.add(BATCH)], "the policy", call.proof()
    assert script.mock_calls == [
        *[call.publish(policy, 0, self_test=True), proven, call.start(), call.make_moments()],
        *[*taken * 3, call.next_message(0), proven, call.finish(), call.publish(policy, 1, self_test=False)],
        *[proven, call.after_step(1), call.save_if_due(policy, 8), call.write(ANY)],
        *[*taken, call.next_message(0), proven, call.finish(), call.publish(policy, 2, self_test=False)],
        *[proven, call.after_step(2), call.save_if_due(policy, 24), call.write(ANY)],
        call.save_final(policy, 24),
    ]
    line = lines_of(script)[1]
    expected = dict(step=2, policy_version=2, samples_in_batch=16, groups_in_batch=2, avg_reward=1.0)
    expected |= dict(total_samples_accumulated=24, grad_norm=1.5, heldout_reward=0.2, weight_sync_s=0.25)
    assert {name: line[name] for name in expected} == expected
    assert line["samples_per_second"] == pytest.approx(16 / line["time_per_batch"])


def test_micro_batches_are_trained_on_while_weights_travel_and_no_step_is_taken_before_their_proof(ranks):
    script = script_of(1, 2, 1, 1)
    script.is_due.side_effect = lambda samples: samples == 24  # a checkpoint after the second step
    trainer(script, ranks, 4, overlaps=lambda step: step < 4).run()
    names = [
        name for name, *_ in script.mock_calls if name in ("publish", "add", "proof", "finish", "save_if_due")
    ]
    first, whole = (
        ["add", "proof", "finish", "publish"],
        ["add", "add", "proof", "finish", "publish", "proof"],
    )
    last = [*first, "proof"]  # nothing follows that it could overlap with
    steps = [first, whole, first, last]
    assert names == ["publish", "proof", *[name for step in steps for name in (*step, "save_if_due")]]
    assert lines_of(script)[0]["weight_sync_s"] == 0.25  # of the last sync that has ended


def test_for_workers_that_joined_the_weights_are_published_once_more_in_the_middle_of_a_step(ranks):
    script = script_of(2)
    script.next_message.side_effect = [BATCH, WorkersJoined(), BATCH, StepEnd(1, 2, 8, stats={})]
    trainer(script, ranks, 1).run()
    taken, policy = [call.next_message(0), call.add(BATCH)], "the policy"
    joined = [call.next_message(0), call.publish(policy, 0, self_test=True), call.proof()]
    assert script.mock_calls[4:11] == [*taken, *joined, *taken]


def test_weights_that_do_not_land_end_the_run_before_the_next_optimizer_step(ranks):
    script = script_of(1, 1, 1)
    script.is_due.return_value = False
    script.proof.side_effect = [
        {},
        {},
        WeightsDidNotLand("g0"),
    ]  # of version 0, asked for twice, and of version 1
    with pytest.raises(WeightsDidNotLand):
        trainer(script, ranks, 3, overlaps=lambda step: True).run()
    assert script.finish.call_count == 1


def test_a_step_that_trained_nothing_is_an_alarm_that_says_why(ranks):
    script = script_of(1, 1, 1)
    script.finish.side_effect = [
        {"update_skipped": 0.0, "num_non_masked_tokens": 5.0},
        {"update_skipped": 1.0, "num_non_masked_tokens": 0.0},
        {"update_skipped": 1.0, "num_non_masked_tokens": 5.0, "grad_norm": float("nan")},
    ]
    trainer(script, ranks, 3).run()
    trained, (left_out,), (not_finite,) = (line["alarms"] for line in lines_of(script))
    assert trained == []
    assert left_out.startswith("the step trained nothing: every token of it was left out of the loss")
    assert not_finite.startswith("the step trained nothing: its loss or its gradient was not finite")
    assert "left out" not in not_finite and "--nonfinite-steps" in not_finite


@pytest.mark.parametrize(
    ("method", "calls_before", "activity"),
    [
        ("publish", 0, "in the self-test of the first weight sync"),
        ("proof", 0, "in the self-test of the first weight sync"),
        ("publish", 1, "while the weights of step 1 were sent"),
        ("save", 0, "while the state of step 1 was copied for a checkpoint"),
        ("save_if_due", 0, "while the model of step 1 was saved"),
        ("save_final", 0, "while the final model was saved"),
    ],
)
def test_a_lack_of_memory_is_named_wherever_it_comes(ranks, method, calls_before, activity):
    script = script_of(1, 1)
    script.is_due.return_value = False
    usual = {"publish": script.proof, "proof": {}}.get(method)
    lack = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    getattr(script, method).side_effect = [*[usual] * calls_before, lack]
    options = {"checkpointer": script, "saves_after": lambda step: step == 1} if method == "save" else {}
    with pytest.raises(OutOfMemory, match=f"^out of memory {activity}: .*Tried to allocate 2.00 GiB"):
        trainer(script, ranks, 2, **options).run()


def test_memory_goes_back_to_the_gpu_before_an_engine_wakes_for_its_weights(ranks):
    script = script_of(1, 1)
    trainer(script, ranks, 2, release_memory=script.release_memory).run()
    names = [name for name, *_ in script.mock_calls if name in ("finish", "release_memory", "publish")]
    assert names == ["publish", *["finish", "release_memory", "publish"] * 2]


def test_memory_is_compared_with_the_plan_once_after_the_first_steps(ranks, caplog):
    """From the second step on there are moments while gradients are computed."""
    script = script_of(*[1] * 5)
    entries = {
        "trainer rank 0": memory_entry(peak_bytes=9e9, baseline_bytes=0, planned_bytes=4e9),
        "g0": memory_entry(peak_bytes=4e9, baseline_bytes=1e9, planned_bytes=2.5e9),
    }
    script.finish.return_value = {"memory": {"trainer rank 0": entries["trainer rank 0"]}}
    messages = [
        replace(message, stats={"memory": {"g0": entries["g0"]}}) if isinstance(message, StepEnd) else message
        for message in script.next_message.side_effect
    ]
    script.next_message.side_effect = messages
    with caplog.at_level("INFO", logger="async_grpo.training.trainer"):
        trainer(script, ranks, 5).run()
    assert [line["memory"] for line in lines_of(script)] == [entries] * 5
    alarms = [line["alarms"] for line in lines_of(script)]
    assert alarms == [[], [], [alarms[2][0]], [], []]
    assert alarms[2][0].startswith("trainer rank 0 takes 9.00 GB, 2.2 times the 4.00 GB that the plan")
    assert [record.getMessage() for record in caplog.records] == [
        "memory of trainer rank 0: at most 9.00 GB; planned: 4.00 GB",
        "memory of g0: at most 4.00 GB, of which 3.00 GB since it began to load the model; planned: 2.50 GB",
    ]


def test_a_run_of_fewer_steps_compares_its_memory_at_the_end(ranks, caplog):
    script = script_of(1, 1)
    script.finish.return_value = {
        "memory": {"trainer rank 0": memory_entry(peak_bytes=9e9, baseline_bytes=0, planned_bytes=4e9)}
    }
    trainer(script, ranks, 2).run()
    assert [len(line["alarms"]) for line in lines_of(script)] == [0, 1]


def test_the_seconds_of_a_step_are_told_apart_and_its_intervals_are_wall_clock(ranks):
    script, before = script_of(2), time.time()
    messages = iter([BATCH, BATCH, StepEnd(1, 2, 8, stats={})])
    script.next_message.side_effect = lambda rank: time.sleep(0.05) or next(messages)
    script.add.side_effect = lambda batch: time.sleep(0.02)
    script.after_step.side_effect = lambda step: time.sleep(0.05) or {}
    script.save_if_due.side_effect = lambda policy, samples: time.sleep(0.1)
    trainer(script, ranks, 1).run()
    (line,) = lines_of(script)
    assert line["seconds_waiting_for_experience"] >= 3 * 0.05  # two micro-batches and the end of the step
    assert line["seconds_computing"] >= 2 * 0.02
    parts = ("seconds_waiting_for_experience", "seconds_computing", "seconds_publishing_weights")
    assert sum(line[part] for part in parts) <= line["time_per_batch"]
    assert 0.05 <= line["seconds_evaluating"] < 0.1 <= line["seconds_checkpointing"]
    intervals = [interval for _, what, *interval in line["spans"] if what == "train"]
    assert len(intervals) == 3  # two micro-batches and the optimizer step
    assert before <= intervals[0][0] and intervals[-1][1] <= time.time() + 0.001
    assert sum(end - start for start, end in intervals) == pytest.approx(line["seconds_computing"], abs=1e-3)


def test_only_rank_0_writes(ranks):
    script = script_of(1)
    trainer(script, dataclasses.replace(ranks, rank=1), 1).run()
    script.finish.assert_called_once()
    script.write.assert_not_called()


def test_a_process_alone_is_a_world_of_one():
    with distributed_run("auto") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
        assert ranks.sum([1.5, 2.0]) == ranks.max([1.5, 2.0]) == [1.5, 2.0]
        assert ranks.sum([]) == []
    assert not torch.distributed.is_initialized()


def test_the_process_group_is_left_also_after_an_error():
    with pytest.raises(ZeroDivisionError), distributed_run("cpu"):
        raise ZeroDivisionError
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="has no GPU"), distributed_run("cuda"):
        pass


CHILD = """
import time
from async_grpo.training.distributed import distributed_run
with distributed_run("cpu"):
    print("ready", flush=True)
    time.sleep(20)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], env={{"RANK": "0", "WORLD_SIZE": "1"}})
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_rank_dies_with_its_launcher():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline().strip() == "ready"
    parent.kill()
    parent.wait(timeout=10)
    deadline = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
