"""The critic in one process; its gradient over two ranks is a case of tests/training/test_whole_step.py."""

import numpy as np
import pytest
import torch
from tiny_policy import critic_policy, random_sequence, tiny_model

from async_grpo.modeling.policy import PolicyModel, value_head_tensors
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.optimizer import build_policy_optimizer

TEMPERATURE = 0.8


def random_sequences():
    rng = np.random.default_rng(0)
    return [random_sequence(rng) for _ in range(6)]


def forward(policy, sequences, **options):
    ids, mask = (torch.tensor(np.concatenate([s[name] for s in sequences])) for name in ("ids", "mask"))
    bounds = torch.tensor(np.cumsum([0, *(len(s["ids"]) for s in sequences)]))
    return policy(ids, bounds, mask, TEMPERATURE, **options)


def test_a_value_is_read_off_the_token_before_and_is_0_where_nothing_is_learnt():
    policy, eager = critic_policy(), tiny_model()
    eager.set_attn_implementation("eager")
    sequences = random_sequences()
    logprobs, entropies, values = forward(policy, sequences)
    torch.testing.assert_close((logprobs, entropies), forward(PolicyModel(tiny_model()), sequences))
    weight, bias = (value_head_tensors(policy)[name] for name in ("weight", "bias"))
    for sequence, got in zip(sequences, values.split([len(s["ids"]) for s in sequences]), strict=True):
        states = eager.model(input_ids=torch.tensor(sequence["ids"])[None]).last_hidden_state[0]
        expected = torch.zeros(len(got))
        for t in range(1, len(got)):
            if sequence["mask"][t]:
                expected[t] = states[t - 1] @ weight[0] + bias[0]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_values_start_at_zero_and_move_the_head_first():
    policy = PolicyModel(tiny_model(), value_head=True)
    _, _, values = forward(policy, random_sequences())
    (values - 1).square().sum().backward()
    assert values.count_nonzero() == 0
    assert policy.value_head.weight.grad.count_nonzero() > 0
    assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in policy.model.parameters())


@pytest.mark.parametrize("value_trunk_gradient", [True, False])
def test_nothing_to_learn_still_runs_the_whole_backward(value_trunk_gradient):
    policy = critic_policy(value_trunk_gradient=value_trunk_gradient)
    dummy = [{"ids": np.arange(3), "mask": np.zeros(3, bool)}]
    sum(result.sum() for result in forward(policy, dummy)).backward()
    assert all(p.grad is not None and p.grad.count_nonzero() == 0 for p in policy.parameters())


def test_values_of_a_bfloat16_model_are_not_rounded():
    with torch.no_grad():
        values = forward(critic_policy().to(torch.bfloat16), random_sequences())[2]
    assert values.dtype is torch.float32
    learnt = values[values != 0]
    assert (learnt.bfloat16().float() != learnt).float().mean() > 0.5


def test_without_a_critic_there_are_no_values():
    assert len(forward(PolicyModel(tiny_model()), random_sequences())) == 2


def test_both_learning_rates_follow_the_schedule_and_every_weight_is_in_one_group():
    policy = critic_policy()
    config = OptimizerConfig(
        learning_rate=1e-3, critic_learning_rate=1e-2, lr_scheduler="linear", num_warmup_steps=0
    )
    optimizer, schedule = build_policy_optimizer(policy, config, total_steps=4)
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.75e-3, 0.75e-2])
    groups = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    assert sorted(groups[0] + groups[1]) == sorted(map(id, policy.parameters()))
    assert groups[1] == [id(p) for p in policy.value_head.parameters()]
