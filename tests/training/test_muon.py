"""Muon's update against Newton-Schulz iterations written by hand, on one rank and two, and its way through a checkpoint."""

import math
from types import SimpleNamespace

import pytest
import torch
from fake_chain import Chain, chain_config
from safetensors.numpy import load_file
from tiny_policy import critic_policy
from torch.distributed.tensor import DTensor, distribute_tensor
from two_ranks import full, on_two_ranks

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.muon import split_parameters
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy

RATE, DECAY, MOMENTUM, STEPS = 0.02, 0.1, 0.9, 3
CONFIG = OptimizerConfig(
    optimizer="muon",
    learning_rate=RATE,
    critic_learning_rate=RATE,
    weight_decay=DECAY,
    muon_momentum=MOMENTUM,
    lr_scheduler="constant",
)


def gradient(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(shape, generator=generator)


def taken_steps(ranks):
    """(weights at the start, weights after some steps with fixed gradients), whole."""
    policy = shard_policy(critic_policy(), ranks)
    optimizer, _ = build_policy_optimizer(policy, CONFIG)
    start = {name: full(p.detach()).clone() for name, p in policy.named_parameters()}
    for step in range(STEPS):
        for name, parameter in policy.named_parameters():
            whole = gradient(name, step, parameter.shape)
            is_sharded = isinstance(parameter, DTensor)
            parameter.grad = (
                distribute_tensor(whole, parameter.device_mesh, parameter.placements) if is_sharded else whole
            )
        optimizer.step()
    return start, {name: full(p.detach()).clone() for name, p in policy.named_parameters()}


def work(ranks, folder):
    return taken_steps(ranks)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """Five steps of X <- a X + b (X X^T) X + c (X X^T)^2 X, from X = G / |G|, with the shorter side first (Jordan 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * (gram @ x) + c * (gram @ gram @ x)
    return x.T if is_tall else x


def expected_weights(start, matrices):
    """Both optimizers in float64, from their papers."""
    weights = {}
    for name, value in start.items():
        weight, first, second = (value.double(), *torch.zeros(2, *value.shape, dtype=torch.float64))
        for step in range(STEPS):
            g = gradient(name, step, value.shape).double()
            weight = weight * (1 - RATE * DECAY)
            if name in matrices:
                first = MOMENTUM * first + (1 - MOMENTUM) * g
                update = orthogonalized((1 - MOMENTUM) * g + MOMENTUM * first)
                weight = weight - RATE * 0.2 * math.sqrt(max(value.shape)) * update
            else:
                first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g**2
                mean, square = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.95 ** (step + 1))
                weight = weight - RATE * mean / (square.sqrt() + 1e-8)
        weights[name] = weight
    return weights


def names_of_matrices():
    policy = critic_policy()
    matrices, _ = split_parameters(policy)
    return {name for name, p in policy.named_parameters() if any(p is matrix for matrix in matrices)}


def test_matrices_are_updated_by_newton_schulz_and_the_rest_by_adamw_on_one_rank_and_two(ranks, tmp_path):
    matrices = names_of_matrices()
    assert len(matrices) == 2 * 7  # per layer: q, k, v, o, gate, up, down
    start, alone = taken_steps(ranks)
    _, together = on_two_ranks(work, tmp_path)
    for name, expected in expected_weights(start, matrices).items():
        change = (expected - start[name]).norm()
        # The library's iterations are in bfloat16, as those of the method's author are
        allowed = 0.03 if name in matrices else 1e-4
        assert (alone[name] - expected).norm() < allowed * change, name
        assert torch.equal(alone[name], together[name]), name


def test_embeddings_heads_vectors_and_larger_tensors_are_left_to_adamw():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 4), torch.nn.Conv2d(1, 2, 3))
    head = torch.nn.Linear(4, 5, bias=False)
    model.append(head)
    model.get_output_embeddings = lambda: head
    matrices, others = split_parameters(SimpleNamespace(model=model))
    assert [matrix.shape for matrix in matrices] == [(4, 3)] and len(others) == 5
    model[1].weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="the model has no matrix that Muon could train"):
        split_parameters(SimpleNamespace(model=model))


def test_a_run_with_muon_goes_on_bit_for_bit(tmp_path):
    options = {"optimizer": "muon", "deterministic": True, "max_staleness": 0, "checkpoint_every_s": 600.0}

    def weights(folder, steps):
        chain = Chain(tmp_path / folder, config=chain_config(num_training_batches=steps, **options))
        chain.train()
        (model,) = (chain.folder / "out" / "hf_format").glob(f"samples_{8 * steps}")
        return load_file(model / "model.safetensors")

    whole, _, parts = weights("whole", 4), weights("parts", 2), weights("parts", 4)
    assert all(whole[name].tobytes() == parts[name].tobytes() for name in whole)


def test_the_schedule_and_the_moments_are_those_of_one_optimizer():
    policy = PolicyModel(critic_policy().model)
    config = OptimizerConfig(optimizer="muon", learning_rate=1.0, num_warmup_steps=4)
    optimizer, scheduler = build_policy_optimizer(policy, config)
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    keys = {tuple(sorted(optimizer.state[parameter])) for parameter in policy.parameters()}
    assert keys == {("momentum_buffer", "step"), ("exp_avg", "exp_avg_sq", "step")}
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_learning_rate_that_changes_after_loading_reaches_adamw_too():
    policy = PolicyModel(critic_policy().model)
    optimizer, _ = build_policy_optimizer(policy, OptimizerConfig(optimizer="muon", weight_decay=0.0))
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
    for parameter in policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())
    assert all(optimizer.state[parameter] for parameter in policy.parameters())
