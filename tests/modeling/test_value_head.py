"""The critic against plain transformers and arithmetic: its place, its gradients, alone and on two ranks.

Two real gloo ranks under FSDP2 share the sequences unevenly and fill up with dummies; the reference is the
eager forward, one sequence at a time, and a loss written out token by token. One spawn serves every case.
"""

import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from tiny_policy import VOCAB, save_tiny_model, tiny_model

from async_grpo.algorithm.process_advantages import value_loss
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.policy import PolicyModel, named_full_tensors, value_head_tensors
from async_grpo.training.checkpoint import CheckpointWriter, load_value_head
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import distributed_run
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy

WORLD_SIZE, DEADLINE_S = 2, 120
TEMPERATURE, VALUE_WEIGHT, ENTROPY_WEIGHT, CLIP = 0.8, 0.5, 0.3, 0.2
CASES = {
    "into the trunk": {"value_trunk_gradient": True},
    "into the trunk, untied head, checkpointing": {
        "value_trunk_gradient": True,
        "tied": False,
        "checkpointing": True,
    },
    "stopped at the head": {"value_trunk_gradient": False},
    "the critic alone, stopped at the head": {"value_trunk_gradient": False, "policy_weight": 0.0},
}


def critic_policy(tied=True, **options):
    """A policy whose critic is not at its initial zero: there the trunk would feel no value loss."""
    policy = PolicyModel(tiny_model(tie_word_embeddings=tied), chunk_tokens=7, value_head=True, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.value_head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return policy


def random_sequences(lengths=(9, 2, 31, 17, 5, 24), seed=0):
    """Per sequence ids, mask, advantages, returns and old values, (L,); the mask ends in trained tokens."""
    rng = np.random.default_rng(seed)
    return [
        {
            "ids": torch.tensor(rng.integers(0, VOCAB, length)),
            "mask": torch.tensor(np.arange(length) >= rng.integers(0, length)),
            **{
                name: torch.tensor(rng.normal(0, 1, length), dtype=torch.float32)
                for name in ("advantages", "returns", "old")
            },
        }
        for length in lengths
    ]


def packed(sequences):
    """{"ids": (N,), ...} of all sequences end to end, with `bounds` (S + 1,)."""
    joined = {name: torch.cat([sequence[name] for sequence in sequences]) for name in sequences[0]}
    return joined | {"bounds": torch.tensor(np.cumsum([0, *(len(s["ids"]) for s in sequences)]))}


def forward(policy, batch, **options):
    return policy(batch["ids"], batch["bounds"], batch["mask"], TEMPERATURE, **options)


def dummy():
    batch = packed(random_sequences(lengths=(3,)))
    return batch | {"mask": torch.zeros(3, dtype=torch.bool)}


def hands():
    """Micro-batches [rank][round]: the ranks have different numbers of them, and dummies for the rest."""
    first, second, third, *rest = random_sequences()
    return [[packed([second, first]), packed(rest)], [dummy(), packed([third])]]


def library_loss(policy, batch, policy_weight):
    """The sum over tokens of policy, entropy and value terms."""
    logprobs, entropies, values = forward(policy, batch, with_values=True)
    learnt = batch["mask"].clone()
    learnt[batch["bounds"][:-1]] = False
    critic, _ = value_loss(values, batch["returns"], batch["old"], learnt, clip=CLIP)
    loss = VALUE_WEIGHT * critic.sum()
    if policy_weight:
        actor = -batch["advantages"] * logprobs - ENTROPY_WEIGHT * entropies
        loss = loss + policy_weight * actor.sum()
    return loss


def reference_gradients(value_trunk_gradient, policy_weight=1.0, tied=True, checkpointing=False):
    """{name: gradient} by eager transformers and plain arithmetic, token by token."""
    policy = critic_policy(tied)
    model, (weight, bias) = policy.model, policy.value_head.parameters()
    model.set_attn_implementation("eager")
    loss = 0.0
    for sequence in random_sequences():
        hidden = model.model(input_ids=sequence["ids"][None]).last_hidden_state[0]
        for t in range(1, len(hidden)):
            if not sequence["mask"][t]:
                continue
            advantage, target, old = (sequence[name][t].item() for name in ("advantages", "returns", "old"))
            state = hidden[t - 1]
            log_p = torch.log_softmax(model.lm_head(state) / TEMPERATURE, dim=0)
            entropy = -(log_p.exp() * log_p).sum()
            loss += policy_weight * (-advantage * log_p[sequence["ids"][t]] - ENTROPY_WEIGHT * entropy)
            value = ((state if value_trunk_gradient else state.detach()) * weight[0]).sum() + bias[0]
            held = torch.clamp(value, old - CLIP, old + CLIP)
            loss += VALUE_WEIGHT * 0.5 * torch.maximum((value - target) ** 2, (held - target) ** 2)
    loss.backward()
    return {name: parameter.grad for name, parameter in policy.named_parameters()}


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sharded_gradients(ranks, dtype="float32", checkpointing=False, policy_weight=1.0, **options):
    """The sum over micro-batches and ranks, of every weight that has a gradient."""
    policy = critic_policy(**options)
    shard_policy(policy, ranks, dtype=dtype, gradient_checkpointing=checkpointing)
    for batch in hands()[ranks.rank]:
        library_loss(policy, batch, policy_weight).backward()
    named = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    return {name: ranks.world_size * full(gradient) for name, gradient in named.items()}


def adamw_step(ranks):
    """Weights before and after one step at two learning rates, by the names in the policy."""
    policy = shard_policy(critic_policy(), ranks)
    optimizer, _ = build_policy_optimizer(
        policy, OptimizerConfig(learning_rate=1e-4, lr_scheduler="constant", critic_learning_rate=1e-2)
    )
    library_loss(policy, hands()[ranks.rank][1], 1.0).backward()
    before = {name: full(p.detach()).clone() for name, p in policy.named_parameters()}
    optimizer.step()
    return before, {name: full(p.detach()) for name, p in policy.named_parameters()}


def save_after_a_forward(ranks, folder):
    """A checkpoint while the forward's gathered weights are still there; the names that engines get."""
    policy = shard_policy(critic_policy(), ranks)
    with torch.no_grad():
        forward(policy, dummy(), with_values=True)
    CheckpointWriter(folder, Path(folder) / "model", ranks, dtype="bfloat16").save(policy, 7)
    return [name for name, _ in named_full_tensors(policy)]


def run_rank(rank: int, port: int, folder: str) -> None:
    """One of the gloo ranks; rank 0 leaves the results in `folder`."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with distributed_run("cpu", timeout_s=60) as ranks:
        results = {name: sharded_gradients(ranks, **options) for name, options in CASES.items()}
        results["bfloat16"] = sharded_gradients(ranks, "bfloat16", value_trunk_gradient=True)
        results["step"] = adamw_step(ranks)
        results["engine names"] = save_after_a_forward(ranks, folder)
    if rank == 0:
        torch.save(results, Path(folder) / "results.pt")
    # gloo's threads outlive the group (FSDP's meshes hold it) and let go of the last collective's tensors when
    # they please: if that is while the interpreter ends, the process aborts
    os._exit(0)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(run_rank, args=(port, str(folder)), nprocs=WORLD_SIZE, join=False)
    deadline = time.monotonic() + DEADLINE_S
    while not context.join(timeout=1.0):  # returns as soon as one of them ends
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the two ranks did not finish within {DEADLINE_S} s")
    return folder, torch.load(folder / "results.pt")


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_dummies_give_the_gradient_of_a_loop_over_tokens(two_ranks, case):
    expected = reference_gradients(**CASES[case])
    gradients = two_ranks[1][case]
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert expected["value_head.weight"].norm() > 0
    for name, gradient in expected.items():
        got = gradients.get(name, torch.zeros_like(gradient))  # the critic alone never reaches the trunk
        assert (got - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-3 * norm), name


def test_bfloat16_compute_keeps_the_gradients_close_to_the_exact_ones(two_ranks):
    expected = reference_gradients(value_trunk_gradient=True)
    gradients = two_ranks[1]["bfloat16"]
    for names in (list(expected), ["value_head.weight", "value_head.bias"]):
        flat = [torch.cat([tensors[name].flatten() for name in names]) for tensors in (gradients, expected)]
        assert flat[0].dtype is torch.float32
        assert torch.nn.functional.cosine_similarity(*flat, dim=0) > 0.99


def test_the_critic_has_a_learning_rate_of_its_own(two_ranks):
    before, after = two_ranks[1]["step"]
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    for (
        name,
        distance,
    ) in moved.items():  # AdamW's first step is one learning rate long, whatever the gradient
        assert distance == pytest.approx(1e-2 if name.startswith("value_head") else 1e-4, rel=0.02), name


def test_a_sharded_critic_is_saved_whole_and_engines_never_hear_of_it(two_ranks):
    folder, results = two_ranks
    assert results["engine names"] == [name for name, _ in tiny_model().named_parameters()]
    fresh = PolicyModel(tiny_model(), value_head=True)
    assert load_value_head(fresh, folder / "hf_format" / "samples_7")
    for name, tensor in value_head_tensors(critic_policy()).items():
        assert torch.equal(value_head_tensors(fresh)[name], tensor)


def test_a_value_is_read_off_the_token_before_and_is_0_where_nothing_is_learnt():
    policy, eager = critic_policy(), tiny_model()
    eager.set_attn_implementation("eager")
    sequences = random_sequences()
    values = forward(policy, packed(sequences), with_values=True)[2]
    assert values.dtype is torch.float32
    for sequence, got in zip(sequences, values.split([len(s["ids"]) for s in sequences]), strict=True):
        states = eager.model(input_ids=sequence["ids"][None]).last_hidden_state[0]
        weight, bias = (value_head_tensors(policy)[name] for name in ("weight", "bias"))
        expected = torch.zeros(len(got))
        for t in range(1, len(got)):
            if sequence["mask"][t]:
                expected[t] = states[t - 1] @ weight[0] + bias[0]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert got[0] == 0


def test_a_value_head_changes_neither_log_probs_nor_entropies_nor_their_number():
    batch = packed(random_sequences())
    without, beside, with_values = (
        forward(PolicyModel(tiny_model()), batch),
        forward(critic_policy(), batch),
        forward(critic_policy(), batch, with_values=True),
    )
    assert (len(without), len(beside), len(with_values)) == (2, 2, 3)
    for expected, *others in zip(without, beside, with_values, strict=False):
        assert all(torch.equal(expected, other) for other in others)


def test_values_start_at_zero_and_move_the_head_first():
    policy = PolicyModel(tiny_model(), value_head=True)
    _, _, values = forward(policy, packed(random_sequences()), with_values=True)
    (values - 1).square().sum().backward()
    assert values.count_nonzero() == 0
    assert policy.value_head.weight.grad.count_nonzero() > 0
    assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in policy.model.parameters())


@pytest.mark.parametrize("value_trunk_gradient", [True, False])
def test_nothing_to_learn_still_runs_the_whole_backward(value_trunk_gradient):
    policy = critic_policy(value_trunk_gradient=value_trunk_gradient)
    sum(result.sum() for result in forward(policy, dummy(), with_values=True)).backward()
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in policy.parameters())


def test_values_of_a_bfloat16_model_are_not_rounded_and_those_of_a_float64_one_stay_so():
    batch = packed(random_sequences())
    narrow = critic_policy().to(torch.bfloat16)
    with torch.no_grad():
        values = forward(narrow, batch, with_values=True)[2]
    assert values.dtype is torch.float32
    learnt = values[values != 0]
    assert (learnt.bfloat16().float() != learnt).float().mean() > 0.5
    wide = critic_policy()
    wide.model.double()
    values = forward(wide, batch, with_values=True)[2]
    assert values.dtype is torch.float64
    values.sum().backward()
    assert wide.value_head.weight.grad.dtype is torch.float32


def test_values_without_a_critic_say_how_to_get_one():
    with pytest.raises(ConfigurationError, match="value_head=True"):
        forward(PolicyModel(tiny_model()), packed(random_sequences()), with_values=True)


def optimizer_groups(policy, **options):
    config = OptimizerConfig(learning_rate=1e-3, lr_scheduler="linear", num_warmup_steps=0, **options)
    optimizer, schedule = build_policy_optimizer(policy, config, total_steps=4)
    rates = []
    for _ in range(4):
        rates.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    return optimizer.param_groups, rates


def test_both_learning_rates_follow_the_schedule_and_every_weight_is_in_one_group():
    policy = critic_policy()
    groups, rates = optimizer_groups(policy, critic_learning_rate=1e-2)
    assert rates == [pytest.approx([1e-3 * left, 1e-2 * left]) for left in (1, 0.75, 0.5, 0.25)]
    optimised = [id(p) for group in groups for p in group["params"]]
    assert sorted(optimised) == sorted(map(id, policy.parameters()))
    assert [id(p) for p in groups[1]["params"]] == [id(p) for p in policy.value_head.parameters()]
    assert optimizer_groups(policy)[1][0] == [1e-3, 1e-5]  # a critic has a rate of its own
    assert optimizer_groups(PolicyModel(tiny_model()))[1][0] == [1e-3]


def test_a_critic_that_cannot_learn_is_refused():
    with pytest.raises(ConfigurationError, match=r"--critic-learning-rate must be above 0, not 0"):
        OptimizerConfig(critic_learning_rate=0.0)
