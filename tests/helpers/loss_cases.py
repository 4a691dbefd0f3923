"""Every policy loss with its options, random inputs for it, and its values and gradients."""

import torch

from async_grpo.algorithm.losses import POLICY_LOSSES

CASES = [
    ("grpo", {}),
    ("gpg", {}),
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.05, "clip_high": 0.4}),
    ("dual_clip", {}),
    ("dual_clip", {"clip_c": 1.3}),
    ("decoupled", {}),
    ("decoupled", {"cap": 1.1}),
    ("decoupled", {"cap": 1.1, "cap_mode": "clamp"}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.05}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 2.0}),
    ("geo_mean", {}),
    ("geo_mean", {"clip_low": 0.1, "clip_high": 0.2}),
    ("dppo_tv", {}),
    ("dppo_tv", {"eps_low": 0.02, "eps_high": 0.05, "clip_c": 1.2}),
    ("dppo_kl", {}),
    ("dppo_kl", {"eps_low": 0.001, "eps_high": 0.002, "clip_c": 1.2}),
    ("topr", {}),
    ("vespo", {}),
    ("vespo", {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.0, "lambda_neg": 4.0}),
    ("dro", {}),
    ("dro", {"beta": 2.0}),
    ("clip_cov", {"ratio": 1.0, "cov_low": -0.5, "cov_high": 0.8}),  # all candidates: nothing left to chance
    ("clip_cov", {"ratio": 1.0, "cov_low": -0.2, "cov_high": 3.0, "clip_low": 0.1, "clip_high": 0.2}),
    ("kl_cov", {"ratio": 0.2}),
    ("kl_cov", {"coef": 0.1}),
]


def random_inputs(seed, dtype=torch.float64, *, spread=0.3, rows=6, tokens=9, with_proximal=False):
    """Return ragged rows with holes, one of them empty.

    Log-ratios lie around 0 with that spread; with a spread above 10 some lie far off.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, tokens, dtype=torch.float64, generator=generator)

    logprobs = -normal().abs()
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    lengths[seed % rows] = 0
    mask = (torch.arange(tokens) < lengths) & (torch.rand(rows, tokens, generator=generator) < 0.8)
    old_logprobs = (logprobs + spread * normal()).clamp(max=-1e-3)
    if spread > 10:  # log-ratios of about -30 and up to +60, which are held at +-20
        logprobs, old_logprobs = (
            values - drop * (normal() > 0.5) for values, drop in ((logprobs, 30), (old_logprobs, 60))
        )
    inputs = {
        "logprobs": logprobs,
        "old_logprobs": old_logprobs,
        "advantages": (normal() + normal()[:, :1]) * (normal().abs() > 0.1),  # some of them 0
        "importance_weights": normal().abs(),
    }
    if with_proximal:
        inputs["proximal_logprobs"] = (logprobs + spread * normal()).clamp(max=-1e-3)
    return {name: values.to(dtype) for name, values in inputs.items()} | {"mask": mask}


def evaluate(name, inputs, coefficients, **options):
    """Return (per-token loss, metrics, gradient of sum(coefficients * loss))."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    loss, metrics = POLICY_LOSSES[name](**inputs | {"logprobs": logprobs}, **options)
    (loss * coefficients).sum().backward()
    return loss.detach(), metrics, logprobs.grad
