"""Statistics of a whole step against arithmetic by hand: over which tokens they go, and what changes from step to step."""

import math
import statistics
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_policy import critic_policy, pack, random_sequence, tiny_model
from two_ranks import recording_accumulator

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.objective import Objective
from async_grpo.training.whole_step import add_step_terms

CPU = torch.device("cpu")
# Of two sequences of three trained tokens: pi / mu. Those above 2 are rejected where a test rejects.
RATIOS = [[1.0, 0.5, 3.0], [1.5, 4.0, 0.75]]
TRAINED = slice(1, None)  # behind the prompt, of one token


def sequence_of(ratios, rewards=(0.0, 0.0, 0.0)):
    """A prompt of one token and a completion of three, which the engine sampled at log-prob -1."""
    return {
        "ids": np.arange(4),
        "mask": np.array([False, True, True, True]),
        "advantages": np.array([math.nan, *rewards]),
        "behaviour": np.array([math.nan, -1.0, -1.0, -1.0]),
        "policy": [0.0, *(math.log(ratio) - 1 for ratio in ratios)],
    }


def rows_of(*micro_batches):
    """The rows of a step; every micro-batch is a list of sequences."""
    return [BatchTensors(pack(sequences), CPU) for sequences in micro_batches]


def fixed_forward(objective, *outputs_by_row):
    """Let the objective find the given outputs (log-probs, entropies, maybe values) in the rows' order."""
    outputs = iter(outputs_by_row)
    objective.forward = lambda policy, row: next(outputs)


def logprobs_of(sequences):
    return torch.tensor([[value for sequence in sequences for value in sequence["policy"]]])


def test_a_critics_advantages_are_whitened_over_all_trained_tokens_rejected_or_not(ranks):
    options = {"rejection_statistic": "token_k1", "rejection_high": 2.0}
    objective = Objective(AlgorithmConfig(advantage_estimator="gae", **options))
    rewards = [[0.0, 0.0, 5.0], [0.0, 2.0, -1.0]]
    values = [[0.5, 1.0, -2.0], [3.0, 0.25, 0.0]]
    sequences = [sequence_of(ratios, paid) for ratios, paid in zip(RATIOS, rewards, strict=True)]
    outputs = [
        (logprobs_of([sequence]), torch.zeros(1, 4), torch.tensor([[0.0, *of_tokens]]))
        for sequence, of_tokens in zip(sequences, values, strict=True)
    ]
    rows = rows_of(*([sequence] for sequence in sequences))
    fixed_forward(objective, *outputs)
    add_step_terms(None, objective, rows, ranks, 0)
    # with gamma = lam = 1: what is still to be earned, less the value
    plain = [
        sum(paid[token:]) - of_tokens[token]
        for paid, of_tokens in zip(rewards, values, strict=True)
        for token in range(3)
    ]
    mean, variance = statistics.fmean(plain), statistics.variance(plain)
    expected = [(value - mean) / math.sqrt(variance + 1e-8) for value in plain]
    assert [row.kept[0, TRAINED].tolist() for row in rows] == [[True, True, False], [True, False, True]]
    got = [value for row in rows for value in row.advantages[0, TRAINED].tolist()]
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_divided_by_the_mean_over_what_is_not_rejected(ranks, level):
    objective = Objective(
        AlgorithmConfig(
            policy_loss="gpg",
            importance_level=level,
            importance_normalize=True,
            importance_high=1.25,
            rejection_statistic="token_k1",
            rejection_high=2.0,
        )
    )
    sequences = [sequence_of(ratios) for ratios in RATIOS]
    rows = rows_of(*([sequence] for sequence in sequences))
    fixed_forward(objective, *((logprobs_of([sequence]), torch.zeros(1, 4)) for sequence in sequences))
    add_step_terms(None, objective, rows, ranks, 0)
    kept = [[ratio for ratio in ratios if ratio <= 2.0] for ratios in RATIOS]
    if level == "token":
        weights = [min(ratio, 1.25) for ratios in kept for ratio in ratios]
    else:
        weights = [min(math.prod(ratios), 1.25) for ratios in kept]
    assert [row.weight_mean for row in rows] == pytest.approx([statistics.fmean(weights)] * 2, rel=1e-6)


def gradients_of_steps(ranks, count, **options):
    """The gradients of the same minibatch in `count` steps, none of which moves a weight."""
    policy = PolicyModel(tiny_model())
    objective = Objective(AlgorithmConfig(**options))
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    rng = np.random.default_rng(3)
    batch = pack([random_sequence(rng, 40, with_ref=True) for _ in range(8)])
    gradients = []
    for _ in range(count):
        accumulator.add(batch)
        accumulator.finish()
        gradients.append(torch.cat([gradient.flatten() for gradient in optimizer.gradients.values()]))
    return gradients


def test_clip_cov_draws_other_tokens_in_every_step(ranks):
    options = {"policy_loss": "clip_cov", "loss_options": "ratio=0.2,cov_low=-50,cov_high=50"}
    gradients = gradients_of_steps(ranks, 4, **options)
    changes = [((one - other).norm() / one.norm()).item() for one, other in pairwise(gradients)]
    assert min(changes) > 1e-3
    # the weights are the same: without a draw all steps are
    gradients = gradients_of_steps(ranks, 2)
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_only_a_step_that_is_taken_moves_the_schedule_and_the_weights(ranks):
    accumulator, _ = recording_accumulator(
        PolicyModel(tiny_model()), Objective(AlgorithmConfig()), ranks, nonfinite_steps=5
    )
    broken = {"mask": np.arange(4) > 1, "advantages": np.ones(4), "behaviour": np.full(4, np.nan)}
    fine = pack([sequence_of([1.0, 1.0, 1.0], (1.0, 1.0, 1.0))])
    steps_of_schedule = []
    for batch in (None, pack([{"ids": np.arange(4), **broken}]), fine, None, fine):
        if batch is not None:
            accumulator.add(batch)
        accumulator.finish()
        steps_of_schedule.append(accumulator.scheduler.last_epoch)
    assert steps_of_schedule == [0, 0, 1, 1, 2]
    assert accumulator.steps == 5  # all of them were steps of the run


def test_every_term_of_the_loss_leaves_rejected_tokens_out(ranks):
    """KL, entropy and value loss go over what is kept, as the policy loss does."""
    options = {
        "advantage_estimator": "gae",
        "kl_coef": 0.5,
        "kl_kind": "k2",
        "entropy_coef": 0.25,
        "critic_coef": 2.0,
        "critic_clip": 100.0,
        "rejection_statistic": "token_k1",
        "rejection_high": 2.0,
        "policy_loss": "gpg",
        "estimator_options": "whiten=false",
        "loss_aggregation": "token_mean",
    }
    objective = Objective(AlgorithmConfig(**options))
    sequences = [sequence_of(RATIOS[0], (0.0, 0.0, 5.0)) | {"ref": np.array([math.nan, -0.5, -2.0, -7.0])}]
    values = torch.tensor([[0.0, 0.5, 1.0, -2.0]], requires_grad=True)
    entropies = torch.tensor([[9.0, 0.1, 0.2, 0.7]])
    logprobs = logprobs_of(sequences).requires_grad_()
    (row,) = rows_of(sequences)
    fixed_forward(objective, (logprobs, entropies, values), (logprobs, entropies, values))
    add_step_terms(None, objective, [row], ranks, 0)
    loss, totals = objective(None, row)
    kept = [0, 1]  # the third ratio is 3
    of_tokens = [math.log(ratio) - 1 for ratio in RATIOS[0]]
    advantages = [5 - 0.5, 5 - 1.0]
    references = [-0.5, -2.0]
    expected = sum(
        -advantages[t] * of_tokens[t]
        + 0.5 * (of_tokens[t] - references[t]) ** 2 / 2
        - 0.25 * entropies[0, 1 + t].item()
        + 2.0 * advantages[t] ** 2 / 2
        for t in kept
    )
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert totals["tokens"] == 2


def test_a_critic_reads_its_old_values_before_the_step(ranks):
    """One step of a real critic: the values that the clip is taken around are those of the weights before it."""
    policy = critic_policy()
    objective = Objective(AlgorithmConfig(advantage_estimator="gae"))
    rng = np.random.default_rng(1)
    (row,) = rows_of([random_sequence(rng) for _ in range(4)])
    add_step_terms(policy, objective, [row], ranks, 0)
    with torch.no_grad():
        expected = policy(row.input_ids, row.cu_seqlens, row.mask[0], 1.0)[2]
    torch.testing.assert_close(row.old_values[0], expected)


def test_weights_of_sequences_go_over_what_is_not_rejected(ranks):
    options = {"policy_loss": "gpg", "importance_level": "sequence", "importance_high": 100.0}
    options |= {"rejection_statistic": "token_k1", "rejection_high": 2.0, "loss_aggregation": "token_sum"}
    objective = Objective(AlgorithmConfig(**options))
    sequence = sequence_of(RATIOS[0], (1.0, 1.0, 1.0))
    (row,) = rows_of([sequence])
    fixed_forward(objective, (logprobs_of([sequence]), torch.zeros(1, 4)))
    loss, totals = objective(None, row)
    # 1 and 1/2 are kept, 3 is not: each token weighs their product
    expected = -0.5 * sum(math.log(ratio) - 1 for ratio in (1.0, 0.5))
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert totals["importance_weight"].item() == pytest.approx(2 * 0.5)


def test_the_mismatch_of_engine_and_trainer_is_measured_before_rejection(ranks):
    options = {"rejection_statistic": "token_k1", "rejection_high": 2.0, "policy_loss": "gpg"}
    accumulator, _ = recording_accumulator(OneWeight(), Objective(AlgorithmConfig(**options)), ranks)
    sequences = [sequence_of(ratios, (1.0, 1.0, 1.0)) for ratios in RATIOS]
    logprobs = logprobs_of(sequences) + 0 * accumulator.policy.weight
    fixed_forward(accumulator.objective, (logprobs, torch.zeros(1, 8)))
    accumulator.add(pack(sequences))
    metrics = accumulator.finish()
    ratios = [ratio for of_sequence in RATIOS for ratio in of_sequence]
    assert metrics["rejected_share"] == pytest.approx(2 / 6)
    assert metrics["mismatch_k1"] == pytest.approx(-statistics.fmean(map(math.log, ratios)), rel=1e-5)
    k3 = [ratio - 1 - math.log(ratio) for ratio in ratios]
    assert metrics["mismatch_kl"] == pytest.approx(statistics.fmean(k3), rel=1e-5)
    squares = math.fsum(ratio**2 for ratio in ratios)
    assert metrics["ess"] == pytest.approx(math.fsum(ratios) ** 2 / (6 * squares), rel=1e-5)
    assert metrics["ratio_p99"] > 3.5  # that of a rejected token is 4


class OneWeight(torch.nn.Module):
    """A policy of one weight, whose outputs a test sets."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.device = CPU


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
def test_covariances_are_those_of_what_is_not_rejected(ranks, loss):
    """A rejected token far from all others would move both means, and the choice with them."""
    options = {"clip_cov": "ratio=0.5,cov_low=0.3,cov_high=50", "kl_cov": "ratio=0.2"}
    objective = Objective(
        AlgorithmConfig(
            policy_loss=loss, loss_options=options[loss], rejection_statistic="token_k1", rejection_high=2.0
        )
    )
    logprobs = [-0.1, -0.4, -3.0, -1.5, -2.0, -9.0]
    advantages = [1.0, 0.5, -1.0, 0.2, -0.3, 40.0]
    ratios = [1.0, 0.9, 1.1, 1.0, 0.8, 5.0]  # the last is rejected
    behaviour = [logprob - math.log(ratio) for logprob, ratio in zip(logprobs, ratios, strict=True)]
    sequence = {
        "ids": np.arange(7),
        "mask": np.arange(7) > 0,
        "advantages": np.array([math.nan, *advantages]),
        "behaviour": np.array([math.nan, *behaviour]),
    }
    (row,) = rows_of([sequence])
    fixed_forward(objective, (torch.tensor([[0.0, *logprobs]]), torch.zeros(1, 7)))
    add_step_terms(None, objective, [row], ranks, 0)
    mean_logprob, mean_advantage = statistics.fmean(logprobs[:5]), statistics.fmean(advantages[:5])
    covariances = [
        (advantage - mean_advantage) * (logprob - mean_logprob)
        for advantage, logprob in zip(advantages[:5], logprobs[:5], strict=True)
    ]
    selected = row.selected[0, TRAINED].tolist()
    if loss == "kl_cov":  # a fifth of the five kept tokens: the one with the largest
        assert selected == [value == max(covariances) for value in covariances] + [False]
    else:  # two of the five, at random, of three candidates
        candidates = [value > 0.3 for value in covariances] + [False]
        assert sum(candidates) == 3 and sum(selected) == 2
        assert all(
            is_candidate for is_candidate, is_chosen in zip(candidates, selected, strict=True) if is_chosen
        )


def test_gamma_and_lam_reach_the_trainers_critic(ranks):
    config = AlgorithmConfig(advantage_estimator="gae", estimator_options="gamma=0.5,lam=0.25,whiten=false")
    objective = Objective(config)
    sequence = sequence_of([1.0, 1.0, 1.0], (0.0, 0.0, 4.0))
    values = [1.0, 2.0, -1.0]
    (row,) = rows_of([sequence])
    fixed_forward(objective, (logprobs_of([sequence]), torch.zeros(1, 4), torch.tensor([[0.0, *values]])))
    add_step_terms(None, objective, [row], ranks, 0)
    last = 4.0 - values[2]
    middle = 0.5 * values[2] - values[1] + 0.5 * 0.25 * last
    first = 0.5 * values[1] - values[0] + 0.5 * 0.25 * middle
    assert row.advantages[0, TRAINED].tolist() == pytest.approx([first, middle, last])
    assert row.returns[0, TRAINED].tolist() == pytest.approx(
        [first + values[0], middle + values[1], last + values[2]]
    )


def test_both_bounds_of_the_clip_and_those_of_weights_reach_the_loss(ranks):
    """Ratios 1.5 and 0.5, with the advantages that make PPO's clip hold them."""
    options = {
        "policy_loss": "ppo_clip",
        "clip_low": 0.25,
        "clip_high": 0.125,
        "loss_aggregation": "token_sum",
    }
    objective = Objective(AlgorithmConfig(**options))
    sequence = sequence_of([1.5, 0.5, 1.0], (1.0, -1.0, 0.0))
    (row,) = rows_of([sequence])
    fixed_forward(objective, (logprobs_of([sequence]), torch.zeros(1, 4)))
    assert objective(None, row)[0].item() == pytest.approx(-1.125 + 0.75)
    weights = {"importance_level": "token", "importance_low": 0.75, "importance_high": 1.25}
    objective = Objective(AlgorithmConfig(policy_loss="gpg", loss_aggregation="token_sum", **weights))
    fixed_forward(objective, (logprobs_of([sequence]), torch.zeros(1, 4)))
    expected = -1.25 * (math.log(1.5) - 1) + 0.75 * (math.log(0.5) - 1)
    assert objective(None, row)[0].item() == pytest.approx(expected, rel=1e-5)
