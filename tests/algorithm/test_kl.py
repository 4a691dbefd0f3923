"""KL estimators against closed forms and against the exact KL of a small distribution."""

import math
import re

import pytest
import torch

from async_grpo.algorithm.kl import kl_penalty
from async_grpo.errors import ConfigurationError

# name -> (value, gradient with respect to logprobs), of the difference d = logprobs - ref_logprobs
CLOSED_FORMS = {
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    "abs": (abs, lambda d: math.copysign(1.0, d)),
}
BASES = list(CLOSED_FORMS)


def evaluate(difference, kind, dtype=torch.float64, **options):
    """(value, gradient) at one token."""
    logprobs = torch.tensor(difference, dtype=dtype, requires_grad=True)
    penalty = kl_penalty(logprobs, torch.zeros_like(logprobs), kind, **options)
    penalty.backward()
    assert penalty.dtype is logprobs.grad.dtype is dtype
    return penalty.item(), logprobs.grad.item()


@pytest.mark.parametrize("kind", BASES)
def test_values_and_gradients_are_the_closed_forms_none_but_k1_is_negative_and_a_plus_takes_the_gradient_of_k2(
    kind,
):
    value, gradient = CLOSED_FORMS[kind]
    for difference in (-30.0, -12.0, -3.5, -0.5, 0.25, 2.0, 12.0, 30.0):
        exact = value(difference), gradient(difference)
        assert evaluate(difference, kind) == pytest.approx(exact, rel=1e-10)
        assert evaluate(difference, kind, torch.float32) == pytest.approx(exact, rel=1e-5)
        assert evaluate(difference, kind + "+") == (evaluate(difference, kind)[0], difference)
    grid = torch.cat([torch.linspace(-width, width, 10**4) for width in (80, 1, 1e-3)])
    assert kind == "k1" or (kl_penalty(grid, torch.zeros_like(grid), kind) >= 0).all()


def two_distributions(scale):
    """Logits (requiring grad), log-probs p of them, and log-probs q of another distribution; 50 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(50, dtype=torch.float64, generator=generator) * scale for _ in range(2))
    logits.requires_grad_()
    return logits, logits.log_softmax(0), other.log_softmax(0)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_average_to_the_exact_kl_over_the_whole_distribution(kind, scale):
    _, p, q = two_distributions(scale)  # at scale 4 some k3 are far above 10
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    torch.testing.assert_close((p.exp() * kl_penalty(p, q, kind)).sum(), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["k2", *(f"{base}+" for base in BASES)])
def test_on_policy_the_expected_gradient_of_k2_and_of_every_plus_is_that_of_the_kl(kind):
    logits, p, q = two_distributions(2.0)
    (exact,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)
    sampled = (p.exp().detach() * kl_penalty(p, q, kind)).sum()  # samples carry no gradient, log-probs do
    (got,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 79.8), (torch.float64, 638.8)])
def test_k3_is_exact_up_to_where_exp_would_overflow_and_held_beyond(dtype, limit):
    value, gradient = evaluate(-(limit - 1), "k3", dtype)
    assert value == pytest.approx(math.exp(limit - 1), rel=1e-4)
    assert gradient == pytest.approx(-math.exp(limit - 1), rel=1e-4)
    for difference in (-limit - 1, -800.0):
        value, gradient = evaluate(difference, "k3", dtype)
        assert value == pytest.approx(math.exp(limit), rel=0.1) and gradient == 0
    assert evaluate(800.0, "k3", dtype) == (799.0, 1.0)  # the side that cannot overflow is not held
    assert math.isfinite(1000 * torch.tensor(evaluate(-800.0, "k3", dtype)[0], dtype=dtype).item())


@pytest.mark.parametrize(
    ("kind", "difference", "value", "gradient"),
    [
        ("k1", -30.0, -10.0, 0.0),
        ("k2", 5.0, 10.0, 0.0),
        ("k3", 30.0, 10.0, 0.0),
        ("k3", -2.0, math.exp(2) - 3, 1 - math.exp(2)),
        ("abs", -11.0, 10.0, 0.0),
        ("k3+", -30.0, 10.0, -30.0),
        ("k1+", -30.0, -10.0, -30.0),
        ("abs+", 3.0, 3.0, 3.0),
    ],
)
def test_a_clamp_holds_the_value_and_stops_the_gradient_but_not_that_of_a_plus(
    kind, difference, value, gradient
):
    assert evaluate(difference, kind, clamp=10.0) == pytest.approx((value, gradient), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "clamp", "message"),
    [
        ("k4", None, "'k4'; choose one of k1, k2, k3, abs, k1+, k2+, k3+, abs+"),
        ("k3++", None, "'k3++'; choose one of"),
        *(("k3", clamp, f"must be positive, not {clamp}") for clamp in (0.0, -10.0, math.nan)),
    ],
)
def test_an_unknown_estimator_and_a_clamp_that_is_not_positive_are_refused(kind, clamp, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        kl_penalty(torch.zeros(1), torch.zeros(1), kind, clamp=clamp)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_unbiased_kl_averages_over_samples_of_the_old_policy_to_value_and_gradient_of_the_exact_kl(kind):
    """DeepSeek-V3.2, eq. 7, by enumeration. Without the ratio, both are those of another expectation."""
    logits, p, q = two_distributions(1.0)
    old = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).log_softmax(0)
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for log_ratio, is_exact in ((p - old, True), (None, False)):
        average = (old.exp() * kl_penalty(p, q, kind, log_ratio=log_ratio)).sum()
        (gradient,) = torch.autograd.grad(average, logits, retain_graph=True)
        assert torch.isclose(average, exact, rtol=1e-10, atol=1e-10).item() == is_exact
        assert torch.allclose(gradient, exact_gradient, rtol=1e-10, atol=1e-10) == is_exact


def test_the_unbiased_kl_is_the_estimate_times_the_ratio_which_has_a_gradient():
    """d = 0.5: k3 = e^-0.5 - 1 + 0.5 = 0.106531, times 1.25. Its gradient: 1.25 (k3 + 1 - e^-0.5)."""
    logprobs = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    old = logprobs.detach() - math.log(1.25)
    value = kl_penalty(logprobs, logprobs.detach() - 0.5, "k3", log_ratio=logprobs - old)
    value.backward()
    assert value.item() == pytest.approx(0.133163, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(1.25 * (0.106531 + 1 - math.exp(-0.5)), abs=1e-6)
