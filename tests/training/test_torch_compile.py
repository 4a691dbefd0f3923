"""Layers that are compiled give the gradient of layers that are not, and are compiled once for batches of any shape."""

import shutil

import numpy as np
import pytest
import torch
from tiny_policy import pack, random_sequence, tiny_model
from torch._dynamo.utils import counters
from two_ranks import recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.modeling import packed
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import shard_policy


@pytest.fixture
def eager_again():
    """Attention as it was: compiling registers it anew, out of the compiler's sight."""
    yield
    packed.ALL_ATTENTION_FUNCTIONS.register(packed.PACKED_ATTENTION, packed.packed_attention)


def gradients(ranks, batch, **options):
    policy = shard_policy(PolicyModel(tiny_model()), ranks, OptimizerConfig(**options))
    accumulator, optimizer = recording_accumulator(policy, Objective(AlgorithmConfig()), ranks)
    accumulator.add(batch)
    accumulator.finish()
    return optimizer.gradients, accumulator


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs")
def test_compiled_layers_give_the_same_gradient_and_are_not_compiled_again(ranks, eager_again):
    rng = np.random.default_rng(0)
    first, *others = [pack([random_sequence(rng) for _ in range(count)]) for count in (8, 3, 11, 1, 20)]
    expected, _ = gradients(ranks, first)
    torch._dynamo.reset()
    counters.clear()
    got, accumulator = gradients(ranks, first, torch_compile=True)
    overall, _ = relative_error(got, expected)
    assert overall < 1e-5
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 4  # not one for each layer
    for batch in others:
        accumulator.add(batch)
    accumulator.finish()
    assert counters["stats"]["unique_graphs"] == graphs
