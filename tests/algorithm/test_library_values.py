"""Losses, gradients and advantages against TRL 1.16, verl 0.9 and OpenRLHF 0.11, on the same numbers.

`library_values.json` has the numbers, and what the libraries' own functions made of them. `scripts/compare_losses` installs
the libraries and runs this test with new values; `scripts/compare_losses --record` writes the file. prime-rl is not on
PyPI: its default loss is written out below, from the source of August 2026.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.config.recipes import RECIPES
from async_grpo.messages import MicroBatch
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.objective import Objective
from async_grpo.training.whole_step import add_step_terms

RECORDED = Path(__file__).with_name("library_values.json")
VALUES = json.loads(Path(os.environ.get("LIBRARY_VALUES", RECORDED)).read_text())
WHOLE_NUMBERS = ("mask", "groups")
INPUTS = {
    name: torch.tensor(values, dtype=torch.int64 if name in WHOLE_NUMBERS else torch.float64)
    for name, values in VALUES["inputs"].items()
}
OPTIONS_OF_LOSSES = set(AlgorithmConfig.__dataclass_fields__)


def of_recipe(name):
    """The options of a recipe that are the trainer's."""
    return {option: value for option, value in RECIPES[name].items() if option in OPTIONS_OF_LOSSES}


CLIP = {"clip_low": 0.2, "clip_high": 0.2}
SEQUENCES = {"loss_aggregation": "sequence_mean_token_mean"}
KL = {"policy_loss": "gpg", "kl_coef": 1.0}
PROXIMAL = {"old_policy": "proximal", **CLIP}
OURS = {  # name of a library's value -> our options
    "trl default": of_recipe("trl"),
    "trl token truncate": of_recipe("trl")
    | {"importance_level": "token", "importance_mode": "truncate", "importance_high": 1.25},
    "trl deepseek_v32": of_recipe("deepseek_v32"),
    "trl unbiased kl": {**CLIP, "kl_coef": 0.5, "unbiased_kl": True},
    "trl plain kl": {**CLIP, "kl_coef": 0.5},
    "trl dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "trl grpo": CLIP | SEQUENCES,
    "trl dr_grpo": CLIP | {"loss_aggregation": "constant_length"},
    "trl cispo": {"policy_loss": "cispo", "clip_high": 0.5},
    "trl sapo": {"policy_loss": "sapo", **SEQUENCES},
    "trl gspo": {"policy_loss": "gspo", "clip_low": 0.125, "clip_high": 0.25, **SEQUENCES},
    "trl luspo": of_recipe("luspo"),
    "trl vespo": {"policy_loss": "vespo"},
    "trl two-sided clip": {"policy_loss": "dual_clip", "loss_options": "clip_c=1.5", **CLIP},
    "trl high entropy": {**CLIP, "top_entropy_quantile": 0.2},
    "verl default": {"policy_loss": "dual_clip", **CLIP},
    "verl vanilla of sequences": {
        "policy_loss": "dual_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        **SEQUENCES,
    },
    "verl vanilla summed": {
        "policy_loss": "dual_clip",
        **CLIP,
        "loss_aggregation": "sequence_mean_token_sum",
    },
    "verl gspo": {"policy_loss": "gspo", **SEQUENCES},
    "verl sapo": {"policy_loss": "sapo", **SEQUENCES},
    "verl gpg": {"policy_loss": "gpg"},
    "verl cispo": {"policy_loss": "cispo", "clip_low": 0.2, "clip_high": 0.5},
    "verl dppo_tv": {"policy_loss": "dppo_tv", "loss_options": "eps_low=0.125,eps_high=0.125"},
    "verl dppo_kl": {"policy_loss": "dppo_kl"},
    "verl dro": {"policy_loss": "dro"},
    "verl kl_cov": {"policy_loss": "kl_cov", "loss_options": "ratio=0.1"},
    **{f"verl kl {kind}": {**KL, "kl_kind": kind} for kind in ("k1", "k2", "k3", "abs", "k3+")},
    "openrlhf default": PROXIMAL,
    "openrlhf dual clip": {
        **PROXIMAL,
        "policy_loss": "dual_clip",
        "loss_options": "clip_c=1.5",
        **SEQUENCES,
    },
    "openrlhf truncated weights": PROXIMAL
    | {"importance_level": "token", "importance_low": 0.75, "importance_high": 1.25},
    "openrlhf masked weights": PROXIMAL
    | {
        "importance_level": "token",
        "importance_mode": "mask",
        "importance_low": 0.75,
        "importance_high": 1.25,
    },
}


def micro_batch(inputs):
    """Every sample as a sequence of a prompt token and its tokens, packed end to end."""
    rows, tokens = inputs["mask"].shape

    def packed(values, first, dtype=np.float64):
        with_prompt = torch.cat([torch.full((rows, 1), first), values.to(torch.float64)], dim=1)
        return with_prompt.flatten().numpy().astype(dtype)

    advantages = inputs["advantages"][:, None].expand(rows, tokens)
    sizes = inputs["mask"].sum(dim=1)
    groups = inputs["groups"]
    return MicroBatch(
        input_ids=np.zeros(rows * (tokens + 1), np.int32),
        cu_seqlens=np.arange(0, rows * (tokens + 1) + 1, tokens + 1, dtype=np.int32),
        loss_mask=packed(inputs["mask"], 0, bool),
        behaviour_logprobs=packed(inputs["behaviour"], 0.0),
        advantages=packed(advantages, 0.0),
        versions=packed(inputs["mask"], 0, np.int32),
        group_ids=groups.numpy(),
        group_tokens=np.array([sizes[groups == group].sum().item() for group in groups]),
        ref_logprobs=packed(inputs["reference"], 0.0),
        proximal_logprobs=packed(inputs["proximal"], 0.0),
    )


class ObjectiveOnNumbers(Objective):
    """The objective, with log-probs and entropies from a table instead of a model."""

    def __init__(self, config, logprobs, entropy):
        super().__init__(config, max_completion_tokens=40)
        self.outputs = [torch.nn.functional.pad(values, (1, 0)) for values in (logprobs, entropy)]

    def forward(self, policy, batch):
        return tuple(torch.where(batch.mask, values.flatten()[None], 0) for values in self.outputs)


def loss_and_gradient(options, inputs, ranks):
    """Those of a step that consists of one micro-batch."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    objective = ObjectiveOnNumbers(AlgorithmConfig(**options), logprobs, inputs["entropy"])
    made = micro_batch(inputs)
    if not objective.config.needs_proximal:
        made = replace(made, proximal_logprobs=None)
    batch = BatchTensors(made, torch.device("cpu"))
    if objective.needs_whole_step:
        add_step_terms(torch.nn.Identity(), objective, [batch], ranks, step=0)
    total, totals = objective(None, batch)
    loss = total / (totals[objective.unit] if objective.unit else 1)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), gradient


def equal(ours, theirs):
    ours = torch.as_tensor(ours, dtype=torch.float64)
    theirs = torch.as_tensor(theirs, dtype=torch.float64)
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", VALUES["losses"])
def test_loss_and_gradient_are_those_of_the_library(name, ranks):
    inputs = INPUTS
    if name.startswith("verl kl "):
        # The KL alone: without advantages the policy loss is 0
        inputs = INPUTS | {"advantages": torch.zeros_like(INPUTS["advantages"])}
    loss, gradient = loss_and_gradient(OURS[name], inputs, ranks)
    theirs = VALUES["losses"][name]
    assert equal(loss, theirs["loss"])
    assert equal(gradient, torch.tensor(theirs["gradient"], dtype=torch.float64))
    assert gradient.abs().max() > 1e-3


def test_the_numbers_reach_every_branch_that_the_comparison_is_about():
    losses = VALUES["losses"]
    distinct = {json.dumps(value["gradient"]) for value in losses.values()}
    # SAPO, and PPO with one bound, are the same in two libraries
    assert len(distinct) >= len(losses) - 4
    gap = ((INPUTS["behaviour"] - INPUTS["logprobs"]) * INPUTS["mask"]).sum(1) / INPUTS["mask"].sum(1)
    is_off_policy = (gap > 0.5) & (INPUTS["advantages"] < 0)
    assert is_off_policy.any() and not is_off_policy.all()
    weights = (-gap * INPUTS["mask"].sum(1)).exp()
    assert (weights > 3).any() and (weights < 3).any()


SETTINGS_OF_ESTIMATORS = {
    "trl": {"eps": 1e-4},
    "verl reinforce_plus_plus": {"gamma": 0.9},
    "verl gae": {"gamma": 0.9, "lam": 0.8, "values": INPUTS["values"]},
}


@pytest.mark.parametrize("name", VALUES["advantages"])
def test_advantages_are_those_of_the_library(name):
    library, _, estimator = name.partition(" ")
    mask = INPUTS["mask"]
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    rewards = torch.zeros_like(INPUTS["logprobs"])
    rewards[torch.arange(len(mask)), last] = INPUTS["rewards"]
    ours = ADVANTAGE_ESTIMATORS[estimator or "grpo"](
        rewards, mask, INPUTS["groups"], **SETTINGS_OF_ESTIMATORS.get(name, {})
    )
    theirs = torch.tensor(VALUES["advantages"][name], dtype=torch.float64)
    assert equal(ours[:, 0] if library == "trl" else ours, theirs)


def prime_rl_loss(logprobs, inputs):
    """`default_loss_fn` of prime-rl: dppo_mask_low and dppo_mask_high 0.2, kl_tau 1e-3, divided by the step's tokens."""
    total = 0.0
    for row, column in inputs["mask"].nonzero().tolist():
        logp = logprobs[row, column]
        old = inputs["behaviour"][row, column]
        advantage = inputs["advantages"][row]
        moved = (logp.exp() - old.exp()).item()
        is_masked = moved > 0.2 if advantage > 0 else moved < -0.2
        if not is_masked:
            total = total - advantage * (logp - old).exp()
        total = total + 1e-3 * (logp - old) ** 2
    return total / inputs["mask"].sum()


def test_the_recipe_of_prime_rl_has_the_gradient_of_its_default_loss(ranks):
    logprobs = INPUTS["logprobs"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(prime_rl_loss(logprobs, INPUTS), logprobs)
    _, gradient = loss_and_gradient(of_recipe("prime_rl"), INPUTS, ranks)
    assert equal(gradient, expected)
    _, without_pull = loss_and_gradient(of_recipe("prime_rl") | {"log_ratio_coef": 0.0}, INPUTS, ranks)
    assert not equal(without_pull, expected)


def test_max_rl_gives_the_published_advantages_of_prime_rl():
    for scores, expected in (([1, 0, 0, 0], [3, -1, -1, -1]), ([0, 0], [0, 0]), ([1, 1], [0, 0])):
        column = torch.tensor(scores, dtype=torch.float64)[:, None]
        groups = torch.zeros(len(scores), dtype=torch.int64)
        advantages = ADVANTAGE_ESTIMATORS["max_rl"](column, torch.ones_like(column), groups)
        assert advantages.flatten().tolist() == expected
