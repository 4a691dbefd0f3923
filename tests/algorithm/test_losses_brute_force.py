"""Every policy loss against loops over sequences and tokens, one scalar at a time, written from the formulas.

The reference shares nothing with the library: plain numbers, and a scalar tensor for every log-prob. The losses of
tokens have random coefficients: each one's gradient shows, also at other tokens of its sequence.
"""

import math

import pytest
import torch
from loss_cases import CASES, evaluate, random_inputs

from async_grpo.algorithm.losses import POLICY_LOSSES


def bounded(k):
    return max(-20.0, min(20.0, k))


def constant(value):
    return torch.tensor(value, dtype=torch.float64)


def ratio_to(logp, old):
    """exp(log ratio) with its gradient; held, without one, beyond 20."""
    k = logp.item() - old
    return (logp - old).exp() if abs(k) <= 20 else constant(math.exp(bounded(k)))


def clipped_ratio_loss(ratio, a, options):
    """(loss, which bound held it): `ratio` carries the gradient."""
    r = ratio.item()
    if a > 0 and r > 1 + options["clip_high"]:
        return constant(-a * (1 + options["clip_high"])), "high"
    if a < 0 and r < 1 - options["clip_low"]:
        return constant(-a * (1 - options["clip_low"])), "low"
    return -a * ratio, None


def geometric_ratio(options, logps, olds, advantages):
    """The sequence's ratio of GMPO, each log-ratio held on the side where its advantage would push further."""
    total = constant(0.0)
    for logp, old, a in zip(logps, olds, advantages, strict=True):
        k = bounded(logp.item() - old)
        if a > 0 and k > options["clip_high"]:
            total = total + options["clip_high"]
        elif a < 0 and k < -options["clip_low"]:
            total = total - options["clip_low"]
        elif a != 0:
            total = total + (logp - old if abs(k) < 20 else k)
    return (total / len(logps)).exp()


def brute_force_sequence(name, options, logps, olds, advantages, proximals, selected):
    """The losses of one sequence's unmasked tokens; everything but `logps` are plain numbers."""
    n = len(logps)
    ks = [bounded(logp.item() - old) for logp, old in zip(logps, olds, strict=True)]
    mean_ratio = math.exp(sum(ks) / n)
    losses, clips = [], []
    for i, (logp, old, a, k) in enumerate(zip(logps, olds, advantages, ks, strict=True)):
        rho, held = math.exp(k), None
        ratio = ratio_to(logp, old)
        if name == "grpo":
            loss = -a + 0 * logp - a * (logp - logp.item())
        elif name == "gpg":
            loss = -a * logp
        elif name in ("ppo_clip", "clip_cov"):
            loss, held = clipped_ratio_loss(ratio, a, options)
            loss = constant(0.0) if name == "clip_cov" and selected[i] else loss
        elif name == "dual_clip":
            loss, held = clipped_ratio_loss(ratio, a, options)
            if a < 0 and rho > options["clip_c"]:
                loss = constant(-a * options["clip_c"])
        elif name == "decoupled":
            weight = math.exp(bounded(proximals[i] - old))
            if weight > options["cap"]:
                weight = {"drop": 0.0, "clamp": options["cap"]}[options["cap_mode"]]
            loss, held = clipped_ratio_loss(ratio_to(logp, proximals[i]), a, options)
            loss = weight * loss
        elif name == "gspo":
            loss, held = clipped_ratio_loss(mean_ratio * (1 + logp - logp.item()), a, options)
        elif name == "cispo":
            weight = min(rho, 1 + options["clip_high"])
            weight = weight if options["clip_low"] is None else max(weight, 1 - options["clip_low"])
            loss = -weight * a * logp
            held = "high" if weight < rho else "low" if weight > rho else None
        elif name == "sapo":
            tau = options["tau_pos"] if a > 0 else options["tau_neg"]
            loss = -a * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
        elif name == "geo_mean":
            loss = -a * geometric_ratio(options, logps, olds, advantages)
            held = "high" if a > 0 and k > options["clip_high"] else None
            held = "low" if a < 0 and k < -options["clip_low"] else held
        elif name in ("dppo_tv", "dppo_kl"):
            p, q = math.exp(logp.item()), math.exp(old)
            binary_kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            distance = abs(p - q) if name == "dppo_tv" else binary_kl
            if a > 0 and p > q and distance > options["eps_high"]:
                held = "high"
            if a < 0 and p < q and distance > options["eps_low"]:
                held = "low"
            loss = constant(0.0) if held else -a * min(rho, options["clip_c"]) * logp
        elif name == "topr":
            weight = 1 if sum(advantages) >= 0 else min(1.0, mean_ratio)
            held = "high" if sum(advantages) < 0 and mean_ratio > 1 else None
            loss = -weight * a * logp
        elif name == "vespo":
            product = math.exp(max(math.log(1e-8), min(20.0, sum(ks))))
            power, decay = [options[f"{o}_{'pos' if a >= 0 else 'neg'}"] for o in ("k", "lambda")]
            loss = -(product**power) * math.exp(decay * (1 - product)) * a * logp
        elif name == "dro":
            loss = -(a * logp - options["beta"] / 2 * (logp - old) ** 2)
        elif name == "kl_cov":
            loss = -a * ratio + (options["coef"] * abs(logp - old) if selected[i] else 0)
        losses.append(loss)
        clips.append(held)
    return losses, clips


def brute_force_selection(name, options, inputs):
    """(B, T) bool over the whole batch: sorted() and if, no tensors of the library."""
    positions = [tuple(p) for p in inputs["mask"].nonzero().tolist()]
    logp, old, adv = (
        {p: inputs[key][p].item() for p in positions} for key in ("logprobs", "old_logprobs", "advantages")
    )
    mean_logp, mean_adv = (sum(values.values()) / len(positions) for values in (logp, adv))
    cov = {p: (adv[p] - mean_adv) * (logp[p] - mean_logp) for p in positions}
    selected = torch.zeros_like(inputs["mask"])
    if name == "kl_cov":
        quota = max(1, int(options["ratio"] * len(positions)))
        for p in sorted(positions, key=cov.get, reverse=True)[:quota]:
            selected[p] = True
    if name == "clip_cov":
        assert options["ratio"] == 1, "the reference has no random numbers"
        for p in positions:
            _, clipped = clipped_ratio_loss(constant(math.exp(logp[p] - old[p])), adv[p], options)
            selected[p] = options["cov_low"] < cov[p] < options["cov_high"] and clipped is None
    return selected


def brute_force(name, options, inputs, coefficients):
    """(per-token loss, clip "low"/"high"/None by position, gradient), by loops."""
    options = POLICY_LOSSES[name].options | options
    selected = brute_force_selection(name, options, inputs)
    loss, gradient = torch.zeros_like(inputs["logprobs"]), torch.zeros_like(inputs["logprobs"])
    held = {}
    for b, row in enumerate(inputs["mask"].tolist()):
        positions = [(b, t) for t, unmasked in enumerate(row) if unmasked]
        if not positions:
            continue
        leaves = [inputs["logprobs"][p].clone().requires_grad_() for p in positions]
        columns = [
            [inputs.get(key, inputs["old_logprobs"])[p].item() for p in positions]
            for key in ("old_logprobs", "advantages", "proximal_logprobs")
        ]
        chosen = [bool(selected[p]) for p in positions]
        losses, clips = brute_force_sequence(name, options, leaves, *columns, chosen)
        total = 0 * sum(leaves)  # every token may be held, and nothing left to differentiate
        for p, value, clipped in zip(positions, losses, clips, strict=True):
            value = value * inputs["importance_weights"][p].item()
            loss[p], held[p] = value.item(), clipped
            total = total + coefficients[p].item() * value
        for p, slope in zip(positions, torch.autograd.grad(total, leaves), strict=True):
            gradient[p] = slope
    return loss, held, gradient


def agree(got, expected, tolerance):
    return torch.allclose(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_values_gradients_and_clip_fractions_are_those_of_the_loops(name, options):
    for seed, spread in enumerate((1e-4, 0.3, 2.0, 20.0) * 2):
        inputs = random_inputs(seed, spread=spread, with_proximal=name == "decoupled")
        generator = torch.Generator().manual_seed(100 + seed)
        coefficients = torch.randn(inputs["mask"].shape, dtype=torch.float64, generator=generator)
        loss, metrics, gradient = evaluate(name, inputs, coefficients, **options)
        expected_loss, held, expected_gradient = brute_force(name, options, inputs, coefficients)
        assert agree(loss, expected_loss, 1e-10) and agree(gradient, expected_gradient, 1e-10)
        assert all(torch.isfinite(values).all() for values in (loss, gradient, *metrics.values()))
        for bound in ("low", "high"):
            counted = metrics.get(f"clip_frac_{bound}", torch.zeros_like(loss))
            assert {tuple(p) for p in counted.nonzero().tolist()} == {
                p for p, which in held.items() if which == bound
            }


@pytest.mark.parametrize(("name", "options"), CASES)
def test_float32_agrees_with_float64(name, options):
    for seed in range(3):
        # The same numbers in both: rounding the inputs is not the loss's doing
        single = random_inputs(seed, torch.float32, with_proximal=name == "decoupled")
        double = {key: values.double() if key != "mask" else values for key, values in single.items()}
        ones = torch.ones(single["mask"].shape)
        loss, metrics, gradient = evaluate(name, single, ones, **options)
        expected_loss, _, expected_gradient = evaluate(name, double, ones.double(), **options)
        assert agree(loss, expected_loss, 1e-5) and agree(gradient, expected_gradient, 1e-5)
        assert {values.dtype for values in (loss, gradient, *metrics.values())} == {torch.float32}


def test_every_loss_has_a_case():
    assert {name for name, _ in CASES} == set(POLICY_LOSSES)
