"""Policy losses: what masked positions and packing may not change, and their options.

`test_losses_brute_force` holds every loss against loops, `test_losses_sharding` against micro-batches and ranks.
"""

import math

import pytest
import torch
from loss_cases import CASES, evaluate, random_inputs

from async_grpo.algorithm.config import PROXIMAL_LOSSES
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.errors import ConfigurationError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dppo_kl_finds_no_infinite_distance_where_log_p_is_rounded_to_0(dtype):
    """From p = 0.999 to 1 the distance to 1 - 1e-8 counts: .001 log(.001 / 1e-8) = 0.0115 <= 0.05."""
    logprobs = torch.zeros(1, 2, dtype=dtype, requires_grad=True)
    old = torch.tensor([[math.log(0.999), 0.0]], dtype=dtype)
    loss, _ = POLICY_LOSSES["dppo_kl"](logprobs, old, torch.ones(1, 2, dtype=dtype), torch.ones(1, 2))
    loss.sum().backward()
    assert logprobs.grad.tolist() == [pytest.approx([-1 / 0.999, -1])]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_only_the_log_probs_of_the_policy_get_a_gradient(name, options):
    inputs = random_inputs(0, with_proximal=name == "decoupled")
    leaves = {key: values.requires_grad_() for key, values in inputs.items() if key != "mask"}
    loss, metrics = POLICY_LOSSES[name](**inputs, **options)
    loss.sum().backward()
    assert [key for key, values in leaves.items() if values.grad is not None] == ["logprobs"]
    assert not any(metric.requires_grad for metric in metrics.values())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_packed_row_of_sequences_with_garbage_where_it_is_masked_equals_one_row_each(
    name, options, shuffle
):
    inputs = random_inputs(3, with_proximal=name == "decoupled")
    mask, generator = inputs["mask"], torch.Generator().manual_seed(0)
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e30], dtype=torch.float64)
    garbage = garbage[torch.arange(mask.numel()) % 4].view_as(mask)
    dirty = {key: torch.where(mask, values, garbage) for key, values in inputs.items() if key != "mask"}
    names = torch.randint(0, 10**15, mask.shape[:1], generator=generator)
    dirty |= {"mask": mask, "sequence_ids": torch.where(mask, names[:, None], -5)}
    if POLICY_LOSSES[name].needs_selection:
        inputs["selected"] = torch.rand(mask.shape, generator=generator) < 0.3
        dirty["selected"] = inputs["selected"] ^ ~mask
    coefficients = torch.randn(mask.shape, dtype=torch.float64, generator=generator)
    order = torch.randperm(mask.numel(), generator=generator) if shuffle else torch.arange(mask.numel())
    packed = {key: values.flatten()[order][None] for key, values in dirty.items()}
    results = []
    for layout, weights in ((inputs, coefficients), (packed, coefficients.flatten()[order][None])):
        loss, metrics, gradient = evaluate(name, layout, weights, **options)
        results.append([loss, gradient, *metrics.values()])
    for in_rows, in_one in zip(*results, strict=True):
        torch.testing.assert_close(in_one[0], in_rows.flatten()[order], rtol=1e-12, atol=1e-12)


def test_float32_rounding_does_not_turn_a_good_sequence_into_a_bad_one():
    """1e8 + 1 - 1e8 - 0.5 is 0.5, and -0.5 if summed in float32."""
    logprobs = torch.full((1, 4), -2.0, requires_grad=True)
    advantages = torch.tensor([[1e8, 1, -1e8, -0.5]])
    loss, _ = POLICY_LOSSES["topr"](logprobs, torch.full((1, 4), -1.0), advantages, torch.ones(1, 4))
    loss.sum().backward()
    assert torch.equal(logprobs.grad, -advantages)


@pytest.mark.parametrize("ratio, weight", [(1.0, 1.0), (0.5, 1.120422), (2.0, 0.199148)])
def test_the_weight_of_vespo_is_1_on_policy_and_falls_on_both_sides_of_its_maximum(ratio, weight):
    """k 2 and lambda 3 at A >= 0: w^2 e^(3 - 3 w). The product over two tokens is the ratio."""
    logprobs = torch.zeros(1, 2, requires_grad=True)
    old = torch.full((1, 2), -math.log(ratio) / 2)
    loss, metrics = POLICY_LOSSES["vespo"](logprobs, old, torch.ones(1, 2), torch.ones(1, 2))
    loss.sum().backward()
    assert logprobs.grad.tolist() == [pytest.approx([-weight, -weight], abs=1e-6)]
    assert metrics["sequence_weight_mean"].tolist() == [pytest.approx([weight, weight], abs=1e-6)]


def test_what_the_trainer_must_know_of_a_loss():
    def having(flag):
        return {name for name, loss in POLICY_LOSSES.items() if getattr(loss, flag)}

    assert having("needs_proximal") == PROXIMAL_LOSSES == {"decoupled"}
    assert having("needs_selection") == {"clip_cov", "kl_cov"}
    assert having("sequence_level") == {"gspo", "geo_mean", "topr", "vespo"}


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_a_loss_without_the_ratio_does_not_read_the_old_log_probs(name):
    inputs = random_inputs(1, with_proximal=name == "decoupled")
    other = inputs | {"old_logprobs": inputs["old_logprobs"] - 0.3}
    coefficients = torch.ones(inputs["mask"].shape, dtype=torch.float64)
    first, second = (evaluate(name, values, coefficients) for values in (inputs, other))
    unchanged = torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    assert unchanged == (not POLICY_LOSSES[name].uses_ratio)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_options_are_settings_alone_and_others_are_answered_with_the_known_ones(name):
    loss = POLICY_LOSSES[name]
    assert all(value is None or isinstance(value, float | int | str) for value in loss.options.values())
    assert not {"proximal_logprobs", "selected"} & loss.options.keys()
    loss.check_options(**loss.options)
    with pytest.raises(ValueError, match="clip_hihg.*known: .*" + "|".join(loss.options)):
        loss.check_options(clip_hihg=0.3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dro", {"beta": 0.0}, "beta of dro is 0.0"),
        ("dro", {"beta": math.nan}, "beta of dro is nan"),
        ("dual_clip", {"clip_c": 1.0}, "must be > 1"),
        ("decoupled", {"cap": 0.0}, "cap must be positive"),
        ("decoupled", {"cap_mode": "hold"}, "drop, clamp"),
        ("sapo", {"tau_neg": -1.0}, "tau_neg -1.0"),
        ("dppo_tv", {"clip_c": 0.0}, "not positive"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_any_batch(name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        POLICY_LOSSES[name].check_options(**options)


def test_decoupled_without_proximal_log_probs_says_what_to_run():
    with pytest.raises(ValueError, match="proximal logprob worker"):
        evaluate("decoupled", random_inputs(0), torch.ones(()))
