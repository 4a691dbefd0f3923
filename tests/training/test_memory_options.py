"""The trainer's memory options change where things lie, not what is trained: the same steps as one rank that has all."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policy import SETTINGS, pack, random_sequence, save_tiny_model, tiny_model
from two_ranks import on_two_ranks

from async_grpo.cluster import policy_kinds
from async_grpo.config.run import RunConfig
from async_grpo.errors import CheckpointBroken, ConfigurationError
from async_grpo.modeling import copies, local_shard
from async_grpo.modeling.policy import PolicyModel, named_full_tensors
from async_grpo.training.checkpoint import Checkpointer
from async_grpo.training.checkpoint_folder import newest
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks
from async_grpo.training.sharding import canary_logprobs, shard_policy

# Not with the other packages: transformers would import it in every process
EXTRAS = f"{sys.prefix}/extras"
ROWS = 4  # of a step, over all ranks
LAYOUTS = {
    "sharded": {},
    "two copies": {"fsdp_size": 2},
    "four copies": {"fsdp_size": 1},
    "offloaded": {"cpu_offload": True},
    "offloaded copies": {"cpu_offload": True, "fsdp_size": 2, "gradient_checkpointing": True},
}
RATE = {
    "learning_rate": 0.01,
    "num_warmup_steps": 0,
    "max_grad_norm": 0.1,
    "data_path": "x",
    "reward_fns": "format",
}


def made(ranks, folder, run="run", **options):
    """Policy, accumulator and checkpointer as the trainer makes them."""
    config = RunConfig(model_name_or_path=str(folder / "model"), **RATE, **options)
    policy = policy_kinds.load_language_policy(config, SETTINGS, ranks)
    accumulator = policy_kinds.make_accumulator(config, SETTINGS, policy, ranks)
    saver = Checkpointer(folder / run, ranks, policy, accumulator.scheduler, 2, 60, options={}, inputs={})
    return policy, accumulator, saver


def step(accumulator, number):
    """One step on the same rows, however many ranks share them."""
    rng, ranks = np.random.default_rng(number), accumulator.ranks
    rows = [pack([random_sequence(rng) for _ in range(3)]) for _ in range(ROWS)]
    for row in rows[ranks.rank :: ranks.world_size]:
        accumulator.add(row)
    return accumulator.finish()


def weights(policy):
    return {name: tensor.clone() for name, tensor in named_full_tensors(policy)}


def is_trained(weight):
    """Whether a loss depends on it.

    It does not on a key's bias, which adds the same to all scores of one query: its gradient is rounding alone, and Adam
    makes a step of that whose size and sign differ by machine.
    """
    return not weight.endswith("k_proj.bias")


def trained(ranks, folder, run="run", **options):
    """Metrics of three steps, the weights after them and the canary; and the same again, resumed after two."""
    policy, accumulator, saver = made(ranks, folder, run, **options)
    metrics = [step(accumulator, number) for number in range(2)]
    saver.save(2, 24)
    assert saver.wait()
    metrics.append(step(accumulator, 2))
    again, resumed, loader = made(ranks, folder, **options)
    loader.load(newest(folder / run)[0])
    step(resumed, 2)
    canary = torch.from_numpy(canary_logprobs(policy, np.arange(1, 30)))
    return metrics, weights(policy), canary, weights(again)


def work(ranks, folder):
    found = {name: trained(ranks, folder, name, **options) for name, options in LAYOUTS.items()}
    held = copies(next(made(ranks, folder, fsdp_size=2)[0].parameters()))
    return found, held


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layouts")
    save_tiny_model(folder / "model")
    return on_two_ranks(work, folder, world_size=4), folder


def test_every_layout_takes_the_steps_of_one_rank(both, ranks):
    (found, held), folder = both
    expected, all_weights, canary, _ = trained(ranks, folder)
    assert held == 2 and expected[0]["grad_norm"] > 1
    for name, (metrics, after, answered, resumed) in found.items():
        for got, wanted in zip(metrics, expected, strict=True):
            for key in ("grad_norm", "model_norm", "model_delta_norm", "backward_loss", "entropy"):
                assert got[key] == pytest.approx(wanted[key], rel=1e-4), (name, key)
        for weight, value in all_weights.items():
            assert torch.equal(resumed[weight], after[weight]), (name, weight)
            if is_trained(weight):
                torch.testing.assert_close(
                    after[weight], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {weight}"
                )
        torch.testing.assert_close(answered, canary, rtol=0, atol=1e-3)
    policy, accumulator, saver = made(ranks, folder)
    saver.load(newest(folder / "offloaded copies")[0])
    step(accumulator, 2)
    for weight, value in weights(policy).items():
        if is_trained(weight):
            torch.testing.assert_close(value, all_weights[weight], rtol=1e-4, atol=1e-5, msg=weight)


def test_a_size_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(ConfigurationError, match="--fsdp-size 3 does not divide 4 ranks"):
        shard_policy(
            PolicyModel(tiny_model()), Ranks(0, 4, torch.device("cpu")), OptimizerConfig(fsdp_size=3)
        )


def eight_bits(ranks, folder):
    sys.path.append(EXTRAS)
    torch.compile = lambda call, **options: call  # for each shape of a tensor: longer than the test
    metrics, after, _, resumed = trained(ranks, folder, optimizer="adamw_8bit")
    policy, accumulator, saver = made(ranks, folder, optimizer="adamw_8bit")
    saver.load(newest(folder / "run")[0])
    state = accumulator.optimizer.state[policy.model.get_input_embeddings().weight]
    return metrics, after, resumed, local_shard(state["exp_avg"]).codes.float()


@pytest.mark.skipif(not Path(EXTRAS, "torchao").is_dir(), reason="scripts/setup installs torchao there")
def test_moments_of_8_bits_train_nearly_as_whole_ones_and_are_resumed_bit_for_bit(
    tmp_path, ranks, monkeypatch
):
    monkeypatch.syspath_prepend(EXTRAS)
    model = {"vocab_size": 100, "hidden_size": 128}  # tensors of less than 4,096 elements keep whole moments
    save_tiny_model(tmp_path / "model", **model)
    metrics, after, resumed, codes = on_two_ranks(eight_bits, tmp_path)
    expected, all_weights, _, _ = trained(ranks, tmp_path, "plain")
    assert codes.unique().numel() > 50
    began = weights(made(ranks, tmp_path)[0])
    moved, apart = (
        torch.stack([(all_weights[name] - weight).norm() for name, weight in other.items()]).norm()
        for other in (began, after)
    )
    assert 0 < apart < 0.1 * moved
    assert all(torch.equal(resumed[name], weight) for name, weight in after.items())
    assert [m["lr"] for m in metrics] == pytest.approx([m["lr"] for m in expected])
    *_, saver = made(ranks, tmp_path, optimizer="adamw_8bit")
    with pytest.raises(CheckpointBroken):  # its scales are of two ranks' rows
        saver.load(newest(tmp_path / "run")[0])
