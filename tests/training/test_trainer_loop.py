"""The loop's order of calls, with fakes that follow a script, and the ranks' life around it."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch

from async_grpo.errors import ConfigurationError
from async_grpo.training.distributed import distributed_run
from async_grpo.training.trainer import Trainer
from async_grpo.types import StepEnd, dummy_micro_batch

BATCH = dummy_micro_batch(token_id=1)


class Script:
    """Every role of the trainer at once: writes down who was asked for what."""

    def __init__(self, micro_batches_per_step, wait_s=0.0, work_s=0.0):
        self.calls, self.lines = [], []
        self.wait_s, self.work_s = wait_s, work_s
        self.messages = []
        for step, count in enumerate(micro_batches_per_step, start=1):
            self.messages += [*[BATCH] * count, StepEnd(step, 2, 8 * step, stats={"avg_reward": 0.5 * step})]

    def start(self):
        self.calls.append("start")

    def next_message(self, rank):
        time.sleep(self.wait_s)
        return self.messages.pop(0)

    def add(self, batch):
        assert batch is BATCH
        time.sleep(self.work_s)
        self.calls.append("add")

    def finish(self):
        self.calls.append("finish")
        return {"grad_norm": 1.5}

    def publish(self, model, version, *, self_test):
        assert model == "the policy"
        self.calls.append(f"publish {version}" + " with self-test" * self_test)
        return {"seconds_transferring": 0.25}

    def after_step(self, step):
        self.calls.append(f"hook {step}")
        return {"heldout_reward": 0.1 * step}

    def write(self, line):
        self.calls.append("write")
        self.lines.append(line)

    def save_if_due(self, policy, samples):
        self.calls.append(f"save if due at {samples}")

    def save_final(self, policy, samples):
        self.calls.append(f"final save at {samples}")


def trainer(script, ranks, num_steps, **roles):
    default = dict.fromkeys(("accumulator", "source", "publisher", "checkpoints"), script)
    default |= {"write": script.write, "after_step": script.after_step}
    return Trainer(policy="the policy", ranks=ranks, num_steps=num_steps, **(default | roles))


def test_two_steps_in_order_and_a_line_of_what_every_room_had_to_say(ranks):
    script = Script([3, 1])
    trainer(script, ranks, 2).run()
    assert script.calls == [
        *["publish 0 with self-test", "start"],
        *["add", "add", "add", "finish", "publish 1", "hook 1", "save if due at 8", "write"],
        *["add", "finish", "publish 2", "hook 2", "save if due at 24", "write"],
        "final save at 24",
    ]
    line = script.lines[1]
    expected = dict(step=2, policy_version=2, samples_in_batch=16, groups_in_batch=2, avg_reward=1.0)
    expected |= dict(
        total_samples_accumulated=24, grad_norm=1.5, heldout_reward=0.2, seconds_transferring=0.25
    )
    assert {name: line[name] for name in expected} == expected
    assert line["samples_per_second"] == pytest.approx(16 / line["time_per_batch"])


def test_a_step_that_trained_nothing_is_an_alarm(ranks):
    script = Script([1, 1])
    skipped = [0.0, 1.0]
    script.finish = lambda: {"update_skipped": skipped.pop(0)}
    trainer(script, ranks, 2).run()
    assert script.lines[0]["alarms"] == []
    assert [alarm.split(":")[0] for alarm in script.lines[1]["alarms"]] == ["the step trained nothing"]


def test_the_seconds_of_a_step_are_told_apart_and_its_intervals_are_wall_clock(ranks):
    class Slow(Script):
        def after_step(self, step):
            time.sleep(0.05)
            return {}

        def save_if_due(self, policy, samples):
            time.sleep(0.1)

    script, before = Slow([2], wait_s=0.05, work_s=0.02), time.time()
    trainer(script, ranks, 1).run()
    line = script.lines[0]
    assert line["seconds_waiting_for_experience"] >= 3 * 0.05  # two micro-batches and the end of the step
    assert line["seconds_computing"] >= 2 * 0.02
    parts = ("seconds_waiting_for_experience", "seconds_computing", "seconds_publishing_weights")
    assert sum(line[part] for part in parts) <= line["time_per_batch"]
    assert 0.05 <= line["seconds_evaluating"] < 0.1 <= line["seconds_checkpointing"]
    intervals = line["compute_intervals"]
    assert len(intervals) == 3  # two micro-batches and the optimizer step
    assert before <= intervals[0][0] and intervals[-1][1] <= time.time() + 0.001
    assert sum(end - start for start, end in intervals) == pytest.approx(line["seconds_computing"], abs=1e-3)


def test_only_rank_0_writes(ranks):
    script = Script([1])
    trainer(script, dataclasses.replace(ranks, rank=1), 1).run()
    assert "finish" in script.calls and not script.lines


def test_a_process_alone_is_a_world_of_one():
    with distributed_run("auto") as ranks:
        assert (ranks.rank, ranks.world_size, ranks.is_main) == (0, 1, True)
        assert ranks.sum([1.5, 2.0]) == ranks.mean([1.5, 2.0]) == ranks.max([1.5, 2.0]) == [1.5, 2.0]
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
    time.sleep(60)
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
    child = int(parent.stdout.readline())
    assert parent.stdout.readline().strip() == "ready"
    parent.kill()
    parent.wait(timeout=10)
    deadline = time.monotonic() + 10
    try:
        while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    except psutil.NoSuchProcess:
        return
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
