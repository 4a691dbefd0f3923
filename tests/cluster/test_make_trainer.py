"""What the options say is what a rank is made of: each one changed alone changes the step that it is about."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fake_chain import SETTINGS, chain_config
from tiny_policy import pack, random_sequence, save_tiny_model

from async_grpo.cluster import make_trainer as make_trainer_module
from async_grpo.cluster import policy_kinds
from async_grpo.cluster.make_trainer import make_trainer
from async_grpo.cluster.policy_kinds import load_language_policy, make_accumulator
from async_grpo.modeling import full_tensor
from async_grpo.training.distributed import distributed_run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def a_step(model):
    """The metrics of one step with these options, and the policy after it."""

    def step(room=16, steps=1, **options):
        config = chain_config(model_name_or_path=str(model), **options)
        settings = dataclasses.replace(SETTINGS, guaranteed_completion_tokens=room)
        rng = np.random.default_rng(3)
        batch = pack([{**random_sequence(rng, 12), "group": n, "group_tokens": 5} for n in range(4)])
        with distributed_run("cpu") as ranks:
            policy = load_language_policy(config, settings, ranks)
            accumulator = make_accumulator(config, settings, policy, ranks)
            for _ in range(steps):
                accumulator.add(batch)
                metrics = accumulator.finish()
            return metrics, {name: full_tensor(p).clone() for name, p in policy.named_parameters()}

    return step


def change(one, other):
    """The largest difference of any weight."""
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_constant_length_divides_by_the_longest_completion_that_there_is_room_for(a_step):
    norms = [a_step(room, loss_aggregation="constant_length")[0]["grad_norm"] for room in (8, 16)]
    assert norms[0] == pytest.approx(2 * norms[1], rel=1e-5)
    assert a_step(8)[0]["grad_norm"] == a_step(16)[0]["grad_norm"]  # the other aggregations do not


def test_the_gradient_norm_is_clipped_to_what_the_option_says(a_step):
    _, once = a_step(adam_epsilon=1.0)  # beside such an epsilon the size of the gradient counts
    metrics, held = a_step(adam_epsilon=1.0, max_grad_norm=1e-3)
    start = a_step(adam_epsilon=1.0, learning_rate=1e-30)[1]
    assert metrics["grad_norm"] > 0.1  # as it was before clipping
    assert change(held, start) < 0.05 * change(once, start)


@pytest.mark.parametrize("into_the_trunk", [True, False])
def test_the_values_train_the_trunk_unless_their_gradient_is_stopped(model, into_the_trunk):
    config = chain_config(
        model_name_or_path=str(model), advantage_estimator="gae", critic_trunk_gradient=into_the_trunk
    )
    with distributed_run("cpu") as ranks:
        policy = load_language_policy(config, SETTINGS, ranks)
        torch.nn.init.ones_(policy.value_head.weight)  # at its initial zero nothing would reach the trunk
        ids = torch.arange(6)
        values = policy(ids, torch.tensor([0, 6]), torch.ones(6, dtype=torch.bool), 1.0)[2]
        values.sum().backward()
        grads = [full_tensor(p.grad) for p in policy.model.parameters() if p.grad is not None]
        assert any(grad.count_nonzero() for grad in grads) == into_the_trunk
        assert full_tensor(policy.value_head.weight.grad).count_nonzero()


def test_a_resumed_trainer_counts_and_draws_from_the_step_of_its_checkpoint(model, monkeypatch, tmp_path):
    """The number of the step seeds the draws of clip_cov: those of the first steps must not come again."""
    manifest = SimpleNamespace(step=7, samples=56)
    monkeypatch.setattr(make_trainer_module, "read", lambda folder: manifest)
    monkeypatch.setattr(make_trainer_module, "Checkpointer", Mock())
    config = chain_config(model_name_or_path=str(model), output_dir=str(tmp_path))
    settings = dataclasses.replace(SETTINGS, checkpoint="step_000000007")
    with distributed_run("cpu") as ranks:
        trainer = make_trainer(config, settings, ranks, Mock(), publisher=Mock())
    assert trainer.accumulator.steps == trainer.version == 7 and trainer.samples == 56


@pytest.mark.parametrize(("fsdp_size", "num_shards"), [(0, 4), (2, 2)])
def test_the_planned_memory_counts_each_weight_once_and_frozen_ones_without_gradients_and_moments(
    model, fsdp_size, num_shards
):
    """Of four ranks; with --fsdp-size 2, two of them hold the same shards."""
    config = chain_config(model_name_or_path=str(model), fsdp_size=fsdp_size)
    with distributed_run("cpu") as ranks:
        policy = load_language_policy(config, SETTINGS, ranks)
    four_ranks = SimpleNamespace(world_size=4, is_main=False, device=torch.device("cpu"))

    def planned() -> int:
        return policy_kinds.language_rank_bytes(config, SETTINGS, policy, four_ranks)

    trained = planned()
    frozen = [weight for name, weight in policy.model.named_parameters() if "layers.0" in name]
    for weight in frozen:
        weight.requires_grad_(False)
    gradient, moments, update_stats, checkpoint = 4, 8, 4, 12
    saved_bytes = gradient + moments + update_stats + checkpoint
    num_frozen = sum(weight.numel() for weight in frozen)
    assert trained - planned() == pytest.approx(num_frozen * saved_bytes / num_shards, abs=2)
