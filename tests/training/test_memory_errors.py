"""Wherever a trainer rank runs out of memory, the error says where, of how many tokens, and which option to change."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_chain import SETTINGS, chain_config
from tiny_policy import pack, random_sequence, save_tiny_model

from async_grpo.cluster import policy_kinds
from async_grpo.cluster.make_trainer import make_trainer
from async_grpo.cluster.policy_kinds import load_language_policy, make_accumulator
from async_grpo.errors import OutOfMemory
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import GPU_SHARE, distributed_run
from async_grpo.training.memory_cures import micro_batch_cure, start_cure, update_cure
from async_grpo.training.objective import Objective

ROOT = Path(__file__).resolve().parents[2]


def exhausted(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def batch():
    rng = np.random.default_rng(3)
    sequences = [{**random_sequence(rng, 12), "group": number, "group_tokens": 5} for number in range(4)]
    return pack(sequences)


@pytest.fixture
def accumulator_of(model):
    """Make an accumulator with these options."""
    with distributed_run("cpu") as ranks:

        def make(**options):
            config = chain_config(model_name_or_path=str(model), **options)
            return make_accumulator(config, SETTINGS, load_language_policy(config, SETTINGS, ranks), ranks)

        yield make


def test_in_the_forward_pass(accumulator_of, batch, monkeypatch):
    accumulator = accumulator_of()
    monkeypatch.setattr(Objective, "__call__", exhausted)
    expected = (
        rf"out of memory in the forward pass of a micro-batch of {len(batch.input_ids)} tokens in 4 sequences, on trainer "
        r"rank 0 at step 1: lower --max-tokens-per-gpu, use --gradient-checkpointing, .*Tried to allocate 2.00 GiB"
    )
    with pytest.raises(OutOfMemory, match=expected):
        accumulator.add(batch)


def test_in_the_backward_pass(accumulator_of, batch):
    accumulator = accumulator_of(gradient_checkpointing=True)
    next(accumulator.policy.parameters()).register_hook(exhausted)
    with pytest.raises(
        OutOfMemory, match=r"in the backward pass of .* sequences.*: lower --max-tok"
    ) as named:
        accumulator.add(batch)
    assert "use --gradient-checkpointing" not in str(named.value)


def test_in_the_forward_pass_that_some_losses_need_before(accumulator_of, batch, monkeypatch):
    accumulator = accumulator_of(policy_loss="clip_cov")
    accumulator.add(batch)
    monkeypatch.setattr(Objective, "forward", exhausted)
    with pytest.raises(
        OutOfMemory, match="in the forward pass that precedes the gradients of a micro-batch of"
    ):
        accumulator.finish()


@pytest.mark.parametrize("update_stats", [True, False])
def test_in_the_optimizer_step(accumulator_of, batch, monkeypatch, update_stats):
    accumulator = accumulator_of(update_stats=update_stats)
    accumulator.add(batch)
    monkeypatch.setattr(accumulator.optimizer, "step", exhausted)
    with pytest.raises(
        OutOfMemory, match="in the optimizer step 1, on trainer rank 0: .*--optimizer adamw_8bit"
    ):
        accumulator.finish()


def test_while_the_model_is_loaded(model, monkeypatch):
    kind = dataclasses.replace(policy_kinds.POLICY_KINDS["text"], load=exhausted)
    monkeypatch.setitem(policy_kinds.POLICY_KINDS, "text", kind)
    config = chain_config(model_name_or_path=str(model))
    with (
        distributed_run("cpu") as ranks,
        pytest.raises(OutOfMemory, match="while trainer rank 0 loaded the model: .*--lora-rank"),
    ):
        make_trainer(config, SETTINGS, ranks, source=None)


def test_only_options_that_are_not_in_use_yet_are_proposed(monkeypatch):
    plain = OptimizerConfig()
    saving = dataclasses.replace(
        plain, gradient_checkpointing=True, update_stats=False, optimizer="adamw_8bit", cpu_offload=True
    )
    monkeypatch.delenv(GPU_SHARE, raising=False)
    assert "--gradient-checkpointing" in micro_batch_cure(plain, on_gpu=True)
    assert "--no-update-stats" in update_cure(plain, on_gpu=True)
    assert "--cpu-offload" in start_cure(plain, on_gpu=True)
    assert "--cpu-offload" not in start_cure(plain, on_gpu=False)  # all is in main memory there
    for cure in (micro_batch_cure(saving, on_gpu=True), update_cure(saving, on_gpu=True)):
        for option in ("--gradient-checkpointing", "--no-update-stats", "adamw_8bit", "--cpu-offload"):
            assert option not in cure
    assert "--gpu-memory-utilization" not in start_cure(plain, on_gpu=True)
    monkeypatch.setenv(GPU_SHARE, "0.4")
    assert "lower --gpu-memory-utilization, which is the engine's share" in start_cure(plain, on_gpu=True)


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
from tiny_policy import SETTINGS, pack, save_tiny_model
from async_grpo.cluster.policy_kinds import load_language_policy, make_accumulator
from async_grpo.config.run import RunConfig
from async_grpo.training.distributed import distributed_run

torch.set_num_threads(1)
folder = save_tiny_model(Path(sys.argv[1]))
options = {"model_name_or_path": str(folder), "data_path": "x", "reward_fns": "format"}
config = RunConfig(**options, logprob_chunk_size=1 << 20)

def rows(length):
    ids = np.arange(length) % 90
    ones = np.ones(length)
    sequence = {"ids": ids, "mask": ones > 0, "advantages": ones, "behaviour": -ones}
    return pack([sequence])

with distributed_run("cpu") as ranks:
    accumulator = make_accumulator(config, SETTINGS, load_language_policy(config, SETTINGS, ranks), ranks)
    accumulator.add(rows(40))
    accumulator.finish()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20),) * 2)
    try:
        accumulator.add(rows(400_000))
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_real_lack_of_memory_is_named(tmp_path):
    """The kernel refuses the process more than 48 MiB."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'helpers'}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables)
    assert "OutOfMemory out of memory in the " in done.stdout, done.stdout + done.stderr
    assert "of a micro-batch of 400,000 tokens in 1 sequences" in done.stdout
    assert "lower --max-tokens-per-gpu" in done.stdout and "allocate" in done.stdout
