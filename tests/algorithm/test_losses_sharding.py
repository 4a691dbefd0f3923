"""However a minibatch is cut into micro-batches and dealt to ranks, loss and gradient are those of the whole.

Every loss, and every aggregation, each with two of the others, drawn by name. Sequences stay whole, groups do not.
clip_cov and kl_cov choose over the whole minibatch first, from the micro-batches, as a sharded trainer does.
"""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import random_inputs

from async_grpo.algorithm.aggregation import (
    AGGREGATIONS,
    aggregate_loss,
    count_units,
    get_aggregation,
    tokens_of_group,
)
from async_grpo.algorithm.covariance import (
    clip_cov_scores,
    num_selected,
    select,
    token_sums,
    top_scores,
    uniform_draws,
)
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.algorithm.policy_losses import LossBatch

CLIP_COV = {"clip_low": 0.2, "clip_high": 0.2, "cov_low": 0.1, "cov_high": 5.0}
BATCH_NAMES = ("logprobs", "old_logprobs", "advantages", "mask")
ROWS, TOKENS, SCALE = 14, 7, 6.0
SELECTION = {"clip_cov": {"ratio": 0.1, "cov_low": 0.1, "seed": 5}, "kl_cov": {"ratio": 0.1}}
GROUP_IDS = torch.tensor([3, 10**9, 3, 7, 7, 10**9, 3, 0, 0, 7, 42, 10**9, 7, 3])  # 42 is a group of one


def deal(seed, world_size):
    """Row numbers [rank][micro-batch], at random; a rank may go empty-handed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(ROWS, generator=generator)
    cuts = torch.randint(0, ROWS, (5,), generator=generator).sort().values
    hands = [[] for _ in range(world_size)]
    for part in order.tensor_split(cuts):
        if len(part):
            hands[torch.randint(world_size, (), generator=generator)].append(part)
    return hands


def micro_batch(inputs, rows, *, packed):
    """Those rows of every tensor; packed into a single row with sequence ids, or as they are."""
    part = {name: values[rows] for name, values in inputs.items()}
    part["sequence_ids"] = torch.arange(len(rows))[:, None].expand(len(rows), TOKENS)
    return {name: values.reshape(1, -1) for name, values in part.items()} if packed else part


def sharded_selection(name, inputs, hands):
    """(B, T) bool; what crosses ranks are sums and top scores."""
    loss, options = POLICY_LOSSES[name], SELECTION[name]
    keys = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    parts = {rows: micro_batch(inputs | {"keys": keys}, rows, packed=True) for hand in hands for rows in hand}
    batches = {rows: LossBatch(*(part[name] for name in BATCH_NAMES)) for rows, part in parts.items()}
    sums = sum(token_sums(batch) for batch in batches.values())
    count = num_selected(options["ratio"], sums[2].item())
    scores = {
        rows: loss.scores(batches[rows], sums, part["keys"], **{**loss.options, **options})
        for rows, part in parts.items()
    }
    of_ranks = [torch.cat([torch.empty(0), *(scores[rows].flatten() for rows in hand)]) for hand in hands]
    threshold = top_scores(torch.cat([top_scores(own, count) for own in of_ranks]), count)[-1]
    selected = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
    for rows, values in scores.items():
        selected[rows] = select(values, threshold).view(-1, TOKENS)
    return selected


def drawn(names, others):
    """Each of the names with two of the others, by a seed of its own."""
    return [(name, other) for name in names for other in random.Random(name).sample(list(others), 2)]


PAIRS = {*drawn(POLICY_LOSSES, AGGREGATIONS), *((n, mode) for mode, n in drawn(AGGREGATIONS, POLICY_LOSSES))}


@pytest.mark.parametrize(("name", "mode"), sorted(PAIRS))
def test_micro_batches_on_any_ranks_add_up_to_the_whole_batch(name, mode):
    for seed, world_size in enumerate((1, 2, 4)):
        inputs = random_inputs(seed, rows=ROWS, tokens=TOKENS, with_proximal=name == "decoupled")
        group_tokens = tokens_of_group(inputs["mask"], GROUP_IDS)
        hands = deal(seed, world_size)
        options = {}
        if POLICY_LOSSES[name].needs_selection:
            options = SELECTION[name]
            inputs["selected"] = sharded_selection(name, inputs, hands)
        leaf = inputs["logprobs"].clone().requires_grad_()
        per_token, _ = POLICY_LOSSES[name](**inputs | {"logprobs": leaf}, **options)
        whole = aggregate_loss(per_token, inputs["mask"], mode, group_ids=GROUP_IDS, scale=SCALE)
        whole.backward()
        # What training does: un-normalised sums, divided once by the summed counts
        aggregation, total, units, gradient = get_aggregation(mode, SCALE), 0.0, 0.0, torch.zeros_like(leaf)
        for hand in hands:
            rank_leaf = inputs["logprobs"].clone().requires_grad_()
            everything = inputs | {"logprobs": rank_leaf, "group_tokens": group_tokens}
            for number, rows in enumerate(hand):
                part = micro_batch(everything, rows, packed=number % 2 == 0)
                tokens, ids = part.pop("group_tokens"), part["sequence_ids"]
                per_token, _ = POLICY_LOSSES[name](**part, **options)
                value = aggregation.total(per_token, part["mask"], ids, tokens)
                value.backward()
                total += value.item()
                counted = count_units(part["mask"], ids, group_tokens=tokens)
                units += counted[aggregation.unit].item() if aggregation.unit else 0.0
            gradient += 0 if rank_leaf.grad is None else rank_leaf.grad
        assert abs(total / (units or 1.0) - whole.item()) <= 1e-12
        assert (gradient / (units or 1.0) - leaf.grad).abs().max() <= 1e-12


@pytest.mark.parametrize("name", list(SELECTION))
def test_the_selection_over_shards_is_the_one_over_the_whole_batch(name):
    for seed, world_size in enumerate((1, 2, 4) * 3):
        inputs = random_inputs(seed, rows=ROWS, tokens=TOKENS)
        whole = [torch.arange(ROWS)]
        selected = sharded_selection(name, inputs, deal(seed, world_size))
        assert torch.equal(selected, sharded_selection(name, inputs, [whole]))
        assert 0 < selected.sum() <= num_selected(SELECTION[name]["ratio"], inputs["mask"].sum().item())


@given(
    scores=st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 0.75, 2.0]), min_size=1, max_size=12),
    count=st.integers(1, 14),
    cut=st.integers(0, 12),
)
@settings(max_examples=75, deadline=None)
def test_selected_are_the_best_with_their_ties_whoever_holds_them(scores, count, cut):
    whole = torch.tensor(scores)
    gathered = torch.cat([top_scores(whole[:cut], count), top_scores(whole[cut:], count)])
    threshold = top_scores(gathered, count)[-1]
    ranked = sorted((score for score in scores if score > -math.inf), reverse=True)
    lowest = ranked[:count][-1] if ranked else math.inf
    assert select(whole, threshold).tolist() == [score >= lowest for score in scores]


def test_equal_advantages_drive_no_entropy_and_select_nothing():
    inputs = random_inputs(0, torch.float32)
    inputs["advantages"] = torch.full_like(inputs["advantages"], 0.3)
    _, metrics = POLICY_LOSSES["kl_cov"](**inputs)
    assert metrics["selected_frac"].sum() == 0


def test_clip_cov_takes_its_quota_of_the_candidates_at_random():
    chosen = []
    inputs = random_inputs(2, rows=12)
    options = CLIP_COV | {"ratio": 0.05}
    batch = LossBatch(*(inputs[name] for name in BATCH_NAMES))
    candidates = clip_cov_scores(batch, token_sums(batch), seed=0, **CLIP_COV) > -math.inf
    for seed in range(100):
        _, metrics = POLICY_LOSSES["clip_cov"](**inputs, **options, seed=seed)
        selected = metrics["selected_frac"].bool()
        assert selected.sum() == num_selected(0.05, inputs["mask"].sum().item()) < candidates.sum()
        assert not (selected & ~candidates).any()
        chosen.append(selected)
    again = POLICY_LOSSES["clip_cov"](**inputs, **options, seed=99)[1]["selected_frac"].bool()
    assert torch.equal(chosen[-1], again)
    # each candidate in 100 draws with probability k/n: within 5 standard deviations of a binomial
    times = torch.stack(chosen).sum(0)[candidates]
    p = int(chosen[0].sum()) / int(candidates.sum())
    assert (times - 100 * p).abs().max() < 5 * math.sqrt(100 * p * (1 - p))


def splitmix64(state):
    """The published generator's output for a state, in Python's unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_draws_are_splitmix64_whatever_the_shape(seed):
    keys = torch.tensor([[0, 1, 2], [10**12, 2**62, 5]])
    expected = [
        (splitmix64((splitmix64(seed) + key * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
        for key in keys.flatten().tolist()
    ]
    assert uniform_draws(keys, seed).flatten().tolist() == expected
    assert uniform_draws(torch.tensor(0), 0) == 0  # splitmix64(0): the smallest draw, still a candidate
