"""Mismatch metrics against loops over Python floats, and histogram quantiles against torch.quantile."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_off_policy import batches, packed_and_shuffled, ragged

from async_grpo.algorithm.off_policy import (
    FINEST_LOG_RATIO,
    RESOLUTION,
    histogram_quantiles,
    mismatch_report,
    mismatch_sums,
    ratio_histogram,
)

QS = [0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0]


def reference_report(logprobs, behaviour, mask):
    table = zip(logprobs.tolist(), behaviour.tolist(), mask.tolist(), strict=True)
    rows = [[p - b for p, b, m in zip(*row, strict=True) if m] for row in table]
    xs, rows = [x for row in rows for x in row], [row for row in rows if row]
    if not xs:
        return dict.fromkeys(["mismatch_k1", "mismatch_kl", "ess", "chi2_token", "ess_sequence"], math.nan)

    def held(x):
        return max(-20.0, min(20.0, x))

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


def close(expected, tolerance=1e-10):
    return pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True)


@given(batches)
@settings(max_examples=100, deadline=None)
def test_the_report_is_that_of_a_loop_whatever_the_packing_the_order_and_the_garbage(shape):
    arguments = ragged(*shape)
    expected = close(reference_report(*arguments))
    assert mismatch_report(mismatch_sums(*arguments)) == expected
    packed, ids, _ = packed_and_shuffled(shape[0], *arguments)
    assert mismatch_report(mismatch_sums(*packed, sequence_ids=ids)) == expected
    assert torch.equal(ratio_histogram(*packed), ratio_histogram(*arguments))


def test_without_tokens_every_metric_is_nan():
    nothing = torch.full((2, 3), math.nan), torch.zeros(2, 3), torch.zeros(2, 3)
    report = mismatch_report(mismatch_sums(*nothing), ratio_histogram(*nothing))
    assert len(report) == 8 and all(math.isnan(value) for value in report.values())


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
@settings(max_examples=100, deadline=None)
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
