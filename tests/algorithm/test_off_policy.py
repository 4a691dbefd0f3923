"""Importance weights, rejection masks and mismatch metrics against loops over floats, quantiles against torch's."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from async_grpo.algorithm.off_policy import (
    FINEST_LOG_RATIO,
    LEVELS,
    MODES,
    RESOLUTION,
    histogram_quantiles,
    importance_weights,
    mismatch_report,
    mismatch_sums,
    ratio_histogram,
    rejection_mask,
    weight_totals,
)
from async_grpo.algorithm.off_policy import REJECTION_STATISTICS as STATISTICS
from async_grpo.errors import ConfigurationError

QS = [0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0]
GARBAGE = (math.nan, math.inf, -math.inf, 1e30)


def ragged(seed, rows, width, spread=1.0):
    """(logprobs, behaviour, mask), each (rows, width); the mask has holes, and rows that are empty."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -2 * torch.rand(rows, width, dtype=torch.float64, generator=generator)
    behaviour = logprobs + spread * torch.randn(rows, width, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < torch.rand(rows, 1, generator=generator)
    return logprobs, behaviour, mask


def packed_and_shuffled(seed, logprobs, behaviour, mask):
    """The same tokens in one row, in any order, masked ones with garbage in them; and how to undo it."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(mask.numel(), generator=generator)
    garbage = torch.tensor(GARBAGE, dtype=logprobs.dtype)[torch.arange(mask.numel()) % 4].view_as(mask)
    ids = torch.arange(len(mask))[:, None].expand_as(mask)
    ids = torch.where(mask, ids, torch.where(ids % 2 == 0, -7, 10**12))
    columns = (torch.where(mask, logprobs, garbage), torch.where(mask, behaviour, garbage.flip(0)), mask, ids)
    *arguments, ids = (column.flatten()[order][None] for column in columns)
    return arguments, ids, lambda row: row[0][order.argsort()].view_as(mask)


def held(x):
    return max(-20.0, min(20.0, x))


def log_ratios(logprobs, behaviour, mask):
    """[row][t]: x of the unmasked tokens, None where masked."""
    table = zip(logprobs.tolist(), behaviour.tolist(), mask.tolist(), strict=True)
    return [[held(p - b) if m else None for p, b, m in zip(*row, strict=True)] for row in table]


def reference_weights(xs, level, mode, low, high, normalize):
    def bounded(w):
        if mode == "mask":
            return w if (low is None or w >= low) and w <= high else 0.0
        return max(min(w, high), -math.inf if low is None else low)

    weights, counted = [], []
    for row in xs:
        present = [x for x in row if x is not None]
        if level == "token":
            per_token = [bounded(math.exp(x)) for x in present]
            counted += per_token
        else:
            per_token = [bounded(math.exp(held(math.fsum(present))))] * len(present)
            counted += per_token[:1]
        each = iter(per_token)
        weights.append([0.0 if x is None else next(each) for x in row])
    mean = math.fsum(counted) / len(counted) if counted and normalize else 1.0
    return [[w / mean if mean else w for w in row] for row in weights]


def reference_keep(xs, statistic, low, high):
    scope, kind = statistic.rsplit("_", 1)
    per_token = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(x) - 1 - x}[kind]
    pool = {
        "sequence_sum": math.fsum,
        "sequence_mean": lambda values: math.fsum(values) / len(values),
        "sequence_max": max,
    }
    keep = []
    for row in xs:
        values = [per_token(x) for x in row if x is not None]
        if scope != "token" and values:
            values = [pool[scope](values)] * len(values)
        judged = iter(math.exp(value) if kind == "k1" else value for value in values)
        bounds = -math.inf if low is None else low, math.inf if high is None else high
        keep.append([x is not None and bounds[0] <= next(judged) <= bounds[1] for x in row])
    return keep


batches = st.tuples(
    st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 7), st.sampled_from([0.1, 1.0, 15.0])
)


OPTIONS = {
    "level": st.sampled_from(LEVELS),
    "mode": st.sampled_from(MODES),
    "low": st.sampled_from([None, 0.0, 0.5, 0.9]),
    "high": st.sampled_from([0.9, 1.1, 2.0, math.inf]),
    "normalize": st.booleans(),
}


@given(batches, st.fixed_dictionaries(OPTIONS))
@settings(max_examples=75, deadline=None)
def test_weights_are_those_of_a_loop_whatever_the_packing_the_order_and_the_garbage(shape, options):
    arguments = ragged(*shape)
    expected = reference_weights(log_ratios(*arguments), **options)
    expected = torch.tensor(expected, dtype=torch.float64)
    packed, ids, unpack = packed_and_shuffled(shape[0], *arguments)
    as_rows = importance_weights(*arguments, **options)
    for got in (as_rows, unpack(importance_weights(*packed, sequence_ids=ids, **options))):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@given(
    batches,
    st.sampled_from(list(STATISTICS)),
    st.sampled_from([(None, 0.05), (None, 1.0), (None, 5.0), (0.0, 0.1), (0.9, 1.1), (0.3, None)]),
)
@settings(max_examples=75, deadline=None)
def test_kept_tokens_are_those_of_a_loop_whatever_the_packing_the_order_and_the_garbage(
    shape, statistic, bounds
):
    arguments = ragged(*shape)
    options = {"statistic": statistic, "low": bounds[0], "high": bounds[1]}
    expected = torch.tensor(reference_keep(log_ratios(*arguments), *options.values()))
    got = rejection_mask(*arguments, **options)
    assert got.dtype is torch.bool and torch.equal(got, expected)
    packed, ids, unpack = packed_and_shuffled(shape[0], *arguments)
    assert torch.equal(unpack(rejection_mask(*packed, sequence_ids=ids, **options)), expected)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_the_largest_value_of_a_sequence_decides_over_it(kind):
    """Ratios e^0.1 and e^2: k2 is 0.005 and 2, k3 is 0.005 and 4.4."""
    x = torch.tensor([[0.1, 2.0, 0.1], [0.1, 0.1, 0.1]])
    arguments = x, torch.zeros(2, 3), torch.ones(2, 3)
    upper = rejection_mask(*arguments, statistic=f"sequence_max_{kind}", high=1.0)
    lower = rejection_mask(*arguments, statistic=f"sequence_max_{kind}", low=1.0)
    assert upper.tolist() == [[False] * 3, [True] * 3] and lower.tolist() == [[True] * 3, [False] * 3]


def test_a_ratio_on_a_bound_is_kept():
    arguments = torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1)
    for level in LEVELS:
        assert importance_weights(*arguments, level=level, mode="mask", low=1.0, high=1.0).item() == 1
    for statistic in ("token_k1", "sequence_sum_k1", "sequence_mean_k1"):
        assert rejection_mask(*arguments, statistic=statistic, low=1.0, high=1.0).all()


def test_weights_and_masks_carry_no_gradient():
    logprobs = torch.zeros(1, 3, requires_grad=True)
    arguments = logprobs, torch.ones(1, 3, requires_grad=True), torch.ones(1, 3)
    assert not importance_weights(*arguments, normalize=True).requires_grad
    assert not rejection_mask(*arguments, statistic="token_k3", high=1.0).requires_grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(2, 3), (1, 0), (0, 3)])
def test_nothing_unmasked_gives_zeros_keeps_nothing_and_has_nan_for_metrics(level, shape):
    nothing = torch.full(shape, math.nan), torch.full(shape, math.inf), torch.zeros(shape)
    weights = importance_weights(*nothing, level=level, normalize=True)
    assert weights.shape == shape and weights.eq(0).all()
    assert [total.item() for total in weight_totals(*nothing[::2], level=level)] == [0, 0]
    for statistic in STATISTICS:
        assert not rejection_mask(*nothing, statistic=statistic, high=1.0).any()
    report = mismatch_report(mismatch_sums(*nothing), ratio_histogram(*nothing))
    assert len(report) == 8 and all(math.isnan(value) for value in report.values())


@pytest.mark.parametrize("statistic", STATISTICS)
def test_a_nan_where_it_counts_is_neither_weighed_away_nor_rejected(statistic):
    arguments = torch.tensor([[math.nan, 0.0], [0.0, 0.0]]), torch.zeros(2, 2), torch.ones(2, 2)
    for mode in MODES:
        weights = importance_weights(*arguments, mode=mode, low=0.5)
        assert weights[0, 0].isnan() and weights.flatten()[1:].eq(1).all()
    assert rejection_mask(*arguments, statistic=statistic, low=None, high=1.5).all()


@pytest.mark.parametrize(
    ("function", "options", "named"),
    [
        (importance_weights, {"level": "tokens"}, "'tokens'; choose one of token, sequence"),
        (importance_weights, {"mode": "clip"}, "'clip'; choose one of truncate, mask"),
        (importance_weights, {"low": 3.0}, "[3.0, 2.0]"),
        (importance_weights, {"high": math.nan}, "[None, nan]"),
        (rejection_mask, {"statistic": "token_k4", "high": 2.0}, "'token_k4'; choose one of token_k1"),
        (rejection_mask, {"statistic": "token_k1"}, "token_k1 cannot keep [None, None]"),
        (rejection_mask, {"statistic": "token_k3", "low": 2.0, "high": 1.0}, "[2.0, 1.0]"),
        (
            rejection_mask,
            {"statistic": "token_k1", "low": 0.0},
            "[0.0, None]; give low or high or both, with 0 <= low <= high",
        ),
        (rejection_mask, {"statistic": "token_k2", "low": -0.5}, "[-0.5, None]"),
    ],
)
def test_impossible_settings_are_refused_with_their_values(function, options, named):
    with pytest.raises(ConfigurationError, match=re.escape(named)):
        function(*ragged(0, 2, 2), **options)


def reference_report(logprobs, behaviour, mask):
    table = zip(logprobs.tolist(), behaviour.tolist(), mask.tolist(), strict=True)
    rows = [[p - b for p, b, m in zip(*row, strict=True) if m] for row in table]
    xs, rows = [x for row in rows for x in row], [row for row in rows if row]
    if not xs:
        return dict.fromkeys(["mismatch_k1", "mismatch_kl", "ess", "chi2_token", "ess_sequence"], math.nan)

    def effective_fraction(weights):
        return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))

    weights = [math.exp(held(x)) for x in xs]
    return {
        "mismatch_k1": math.fsum(-x for x in xs) / len(xs),
        "mismatch_kl": math.fsum(math.exp(x) - 1 - x for x in xs) / len(xs),
        "ess": effective_fraction(weights),
        "chi2_token": math.fsum(w * w for w in weights) / len(xs) - 1,
        "ess_sequence": effective_fraction([math.exp(held(math.fsum(map(held, row)))) for row in rows]),
    }


@given(batches)
@settings(max_examples=50, deadline=None)
def test_the_report_is_that_of_a_loop_whatever_the_packing_the_order_and_the_garbage(shape):
    arguments = ragged(*shape)
    expected = pytest.approx(reference_report(*arguments), rel=1e-10, abs=1e-10, nan_ok=True)
    assert mismatch_report(mismatch_sums(*arguments)) == expected
    packed, ids, _ = packed_and_shuffled(shape[0], *arguments)
    assert mismatch_report(mismatch_sums(*packed, sequence_ids=ids)) == expected
    assert torch.equal(ratio_histogram(*packed), ratio_histogram(*arguments))


def test_a_nan_where_it_counts_shows_in_the_means_and_not_in_the_histogram():
    arguments = torch.tensor([[math.nan, 0.0, 0.0]]), torch.zeros(1, 3), torch.ones(1, 3)
    histogram = ratio_histogram(*arguments)
    report = mismatch_report(mismatch_sums(*arguments), histogram)
    assert math.isnan(report["mismatch_kl"]) and math.isnan(report["ess"])
    assert histogram.sum() == 2 and report["ratio_p99"] == 1


@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 3, 10, 101, 1000]),
    st.sampled_from([1e-6, 1e-3, 0.05, 1.0, 8.0]),
    st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=50, deadline=None)
def test_quantiles_are_those_of_torch_within_the_resolution(seed, count, spread, shift):
    generator = torch.Generator().manual_seed(seed)
    x = (shift + spread * torch.randn(count, dtype=torch.float64, generator=generator)).clamp(-20, 20)
    qs = torch.tensor(QS, dtype=torch.float64)
    counts = ratio_histogram(x[None], torch.zeros(1, count), torch.ones(1, count))
    got = histogram_quantiles(counts, QS)
    # an order statistic moves within its bin: the quantile lies between those of all moved down, and up
    slack = (RESOLUTION * x.abs() * (1 + 1e-9)).clamp(min=FINEST_LOG_RATIO)
    assert (got >= torch.quantile((x - slack).exp(), qs) * (1 - 1e-12)).all()
    assert (got <= torch.quantile((x + slack).exp(), qs) * (1 + 1e-12)).all()
