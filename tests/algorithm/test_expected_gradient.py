"""The expected gradient of each estimator, by enumeration of every group that a small policy can write.

A group of G completions appears with the product of their probabilities; its gradient estimate is the mean over samples
of sum_t A_t * grad log pi(token t). The expectation is compared with the gradient of the expected reward.
"""

import itertools

import pytest
import torch

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS

# A policy: logits (8,) -> (log-probs, rewards, mask), (C, T) each, of every completion
LOGITS = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def two_tokens(logits, early=(0.0, 0.0)):
    """Two choices, then three that depend on the first; rewards on the last token, and `early` ones."""
    first, second = logits[:2].log_softmax(0), logits[2:].reshape(2, 3).log_softmax(1)
    logprobs = torch.stack([torch.stack([first[i], second[i, j]]) for i in (0, 1) for j in (0, 1, 2)])
    last = torch.tensor([0.3, -1.0, 2.5, 0.1, 0.7, 0.0]).double()
    return logprobs, torch.stack([torch.tensor(early).repeat_interleave(3), last], dim=1), torch.ones(6, 2)


def rewards_on_each(logits):
    return two_tokens(logits, early=(0.5, -0.2))


def stops_early(logits):
    """The first token may end the completion: lengths 1 and 2."""
    first, second = logits[:2].log_softmax(0), logits[2:5].log_softmax(0)
    goes_on = [torch.stack([first[1], second[j]]) for j in range(3)]
    logprobs = torch.stack([torch.stack([first[0], 0 * first[0]]), *goes_on])
    rewards = torch.tensor([[0.6, 0.0], [0.0, -1.0], [0.0, 2.0], [0.0, 0.5]]).double()
    return logprobs, rewards, torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1]])


def right_or_wrong(logits):
    """Two of the six completions are right: reward 1, and 0 otherwise."""
    logprobs, _, mask = two_tokens(logits)
    rewards = torch.zeros(6, 2, dtype=torch.float64)
    rewards[[1, 5], 1] = 1.0
    return logprobs, rewards, mask


def all_groups(policy, logits, group_size):
    """(the completions of every group (N, G), the probability of the group (N,) with its gradient)."""
    logprobs, rewards, mask = policy(logits)
    probabilities = (logprobs * mask).sum(1).exp()
    assert probabilities.sum().item() == pytest.approx(1)
    groups = torch.tensor(list(itertools.product(range(len(rewards)), repeat=group_size)))
    return groups, probabilities[groups].prod(dim=1)


def expected_estimate(policy, name, group_size, **options):
    """The gradient that the estimator expects; tensors in `options` are per completion."""
    logits = LOGITS.clone().requires_grad_()
    logprobs, rewards, mask = policy(logits)
    groups, chance = all_groups(policy, logits, group_size)
    rows, ids = groups.flatten(), torch.arange(len(groups)).repeat_interleave(group_size)
    inputs = {o: value[rows] if torch.is_tensor(value) else value for o, value in options.items()}
    advantages = ADVANTAGE_ESTIMATORS[name](rewards[rows], mask[rows], ids, **inputs)
    estimates = (advantages * logprobs[rows]).sum(dim=1).reshape(-1, group_size).mean(dim=1)
    return torch.autograd.grad((chance.detach() * estimates).sum(), logits)[0]


def true_gradient(policy, best_of=1):
    """Of the expected reward, or of the expected best reward of so many completions."""
    logits = LOGITS.clone().requires_grad_()
    _, rewards, mask = policy(logits)
    groups, chance = all_groups(policy, logits, best_of)
    best = (rewards * mask).sum(1)[groups].amax(dim=1)
    (gradient,) = torch.autograd.grad((chance * best).sum(), logits)
    assert gradient.abs().max() > 0.01
    return gradient


def same(one, other):
    return torch.allclose(one, other, atol=1e-12, rtol=0)


EQUAL_LENGTHS = [two_tokens, rewards_on_each]
POLICIES = [*EQUAL_LENGTHS, stops_early]


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_rloo_expects_the_true_gradient(policy, group_size):
    assert same(expected_estimate(policy, "rloo", group_size), true_gradient(policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_remax_expects_the_true_gradient_whatever_its_baseline(policy):
    baselines = torch.full((len(policy(LOGITS)[1]),), 0.7)
    assert same(expected_estimate(policy, "remax", 2, baselines=baselines), true_gradient(policy))


@pytest.mark.parametrize("name", ["dr_grpo", "opo"])
@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("policy", EQUAL_LENGTHS)
def test_a_sample_in_its_own_baseline_costs_one_part_in_the_group_size(name, policy, group_size):
    estimate = expected_estimate(policy, name, group_size)
    assert same(estimate, true_gradient(policy) * (group_size - 1) / group_size)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_max_rl_follows_the_series_of_the_log_likelihood_up_to_the_order_of_the_group_size_less_one(
    group_size,
):
    estimate = expected_estimate(right_or_wrong, "max_rl", group_size)
    logits = LOGITS.clone().requires_grad_()
    logprobs, rewards, _ = right_or_wrong(logits)
    p = (logprobs.sum(1).exp() * rewards.sum(1)).sum()
    series = -sum((1 - p) ** k / k for k in range(1, group_size))
    (expected,) = torch.autograd.grad(series, logits)
    assert expected.abs().max() > 0.01 and same(estimate, expected)


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_lead_of_the_best_sample_follows_the_gradient_of_the_expected_best(group_size):
    estimate = expected_estimate(two_tokens, "grpo_passk", group_size, normalize=False)
    assert same(group_size * estimate, true_gradient(two_tokens, best_of=group_size))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_sample_per_question_with_the_mean_of_the_batch_costs_one_part_in_the_batch_size(policy):
    """Every sample is a group of its own: the true gradient times (B - 1)/B, whatever the lengths."""
    batch_size = 3
    logits = LOGITS.clone().requires_grad_()
    logprobs, rewards, mask = policy(logits)
    batches, chance = all_groups(policy, logits, batch_size)
    estimates = []
    for rows in batches:
        advantages = ADVANTAGE_ESTIMATORS["flash_reinforce"](
            rewards[rows], mask[rows], torch.arange(batch_size)
        )
        estimates.append((advantages * logprobs[rows]).sum(dim=1).mean())
    (gradient,) = torch.autograd.grad((chance.detach() * torch.stack(estimates)).sum(), logits)
    assert same(gradient, true_gradient(policy) * (batch_size - 1) / batch_size)


@pytest.mark.parametrize("lam, unbiased", [(1.0, True), (0.5, False)])
def test_gae_expects_the_true_gradient_whatever_the_critic_says_of_a_prefix_if_nothing_is_discounted(
    lam, unbiased
):
    values = torch.tensor([[0.4, -3.0]] * 3 + [[0.4, 1.5]] * 3)  # of no token, and of each first one
    estimate = expected_estimate(rewards_on_each, "gae", 2, values=values, lam=lam, whiten=False)
    assert same(estimate, true_gradient(rewards_on_each)) == unbiased
