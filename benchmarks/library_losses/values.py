"""Compute losses, gradients and advantages of TRL, verl and OpenRLHF on fixed numbers, and write them as JSON.

Run by the Python of TRL's environment (`scripts/compare_losses` does it):

    PYTHONPATH=. .venv-trl/bin/python -m benchmarks.library_losses.values FOLDER_OF_VERL_AND_OPENRLHF OUTPUT.json
"""

import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.library_losses.libraries import Inputs, loaded

ROWS = 6
TOKENS = 7
GROUP_SIZE = 3


def make_inputs() -> Inputs:
    """Return float64 numbers for two groups of three samples: log-probs, entropies (B, T), advantages, rewards (B,).

    All are multiples of 2^-10, which float32 represents exactly. In some samples the mask is False in the middle, some
    log-ratios are far from 0, and one sample with a negative advantage has become less probable.
    """
    generator = torch.Generator().manual_seed(11)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return (values * 1024).round() / 1024

    lengths = torch.tensor([7, 3, 5, 6, 2, 7])[:, None]
    mask = (torch.arange(TOKENS) < lengths).long()
    mask[0, 2] = 0
    mask[5, 3:5] = 0
    logprobs = -normal(ROWS, TOKENS).abs() - 0.125
    gaps = normal(ROWS, TOKENS) / 2
    # The engine's log-probs of the second sample are higher by more than 0.5 on average, and its advantage is negative
    gaps[1] = gaps[1].abs() + 0.625
    behaviour = (logprobs + gaps).clamp(max=-1 / 1024)
    advantages = normal(ROWS)
    advantages[1] = -1.25
    return {
        "logprobs": logprobs,
        "behaviour": behaviour,
        "proximal": (behaviour + normal(ROWS, TOKENS) / 8).clamp(max=-1 / 1024),
        "reference": logprobs + normal(ROWS, TOKENS) / 4,
        "entropy": normal(ROWS, TOKENS).abs(),
        "advantages": advantages,
        "rewards": torch.tensor([1.0, 0.0, 0.25, 0.0, 1.0, 1.0], dtype=torch.float64),
        "values": normal(ROWS, TOKENS) / 2,
        "groups": torch.tensor([0, 0, 0, 1, 1, 1]),
        "mask": mask,
    }


SEQUENCE_MEAN = {"aggregation": "seq-mean-token-mean"}
# Name of a value -> (function of `libraries.loaded`, its arguments)
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "trl default": ("trl", {"use_vllm": True}),
    "trl token truncate": (
        "trl",
        {
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "vllm_importance_sampling_clip_max": 1.25,
        },
    ),
    "trl deepseek_v32": ("trl", {"loss_type": "grpo", "beta": 1e-3, "off_policy_mask_threshold": 0.5}),
    "trl unbiased kl": ("trl", {"beta": 0.5}),
    "trl plain kl": ("trl", {"beta": 0.5, "use_bias_correction_kl": False}),
    "trl dapo": ("trl", {"epsilon_high": 0.28}),
    "trl grpo": ("trl", {"loss_type": "grpo"}),
    "trl dr_grpo": ("trl", {"loss_type": "dr_grpo", "max_completion_length": 40}),
    "trl cispo": ("trl", {"loss_type": "cispo", "epsilon_high": 1.5}),
    "trl sapo": ("trl", {"loss_type": "sapo"}),
    "trl gspo": (
        "trl",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.125,
            "epsilon_high": 0.25,
        },
    ),
    "trl luspo": (
        "trl",
        {
            "loss_type": "luspo",
            "importance_sampling_level": "sequence",
            "epsilon": 2e-3,
            "epsilon_high": 2.5e-3,
        },
    ),
    "trl vespo": ("trl", {"loss_type": "vespo"}),
    "trl two-sided clip": ("trl", {"delta": 1.5}),
    "trl high entropy": ("trl", {"top_entropy_quantile": 0.2}),
    "verl default": ("verl", {"name": "vanilla"}),
    "verl vanilla of sequences": ("verl", {"name": "vanilla", "clip_ratio_high": 0.28, **SEQUENCE_MEAN}),
    "verl vanilla summed": ("verl", {"name": "vanilla", "aggregation": "seq-mean-token-sum"}),
    "verl gspo": ("verl", {"name": "gspo", "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, **SEQUENCE_MEAN}),
    "verl sapo": ("verl", {"name": "sapo", **SEQUENCE_MEAN}),
    "verl gpg": ("verl", {"name": "gpg"}),
    "verl cispo": ("verl", {"name": "cispo", "clip_ratio_high": 0.5}),
    "verl dppo_tv": ("verl", {"name": "dppo_tv", "clip_ratio": 0.125, "clip_ratio_c": 20.0}),
    "verl dppo_kl": ("verl", {"name": "dppo_kl", "clip_ratio": 0.05, "clip_ratio_c": 20.0}),
    "verl dro": ("verl", {"name": "dro"}),
    "verl kl_cov": ("verl", {"name": "kl_cov"}),
    **{f"verl kl {kind}": ("verl_kl", {"kind": kind}) for kind in ("k1", "k2", "k3", "abs", "k3+")},
    "openrlhf default": ("openrlhf", {}),
    "openrlhf dual clip": ("openrlhf", {"dual_clip": 1.5, "token_level_loss": False}),
    "openrlhf truncated weights": (
        "openrlhf",
        {
            "is_correction_level": "token",
            "is_correction_mode": "clip",
            "is_correction_threshold": (0.75, 1.25),
        },
    ),
    "openrlhf masked weights": (
        "openrlhf",
        {"is_correction_level": "token", "is_correction_threshold": (0.75, 1.25)},
    ),
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo_passk": {"config": {}},
    "rloo": {},
    "opo": {},
    "gpg": {},
    "reinforce_plus_plus_baseline": {},
    "reinforce_plus_plus": {"config": SimpleNamespace(gamma=0.9)},
}


def library_values(folder: Path) -> dict[str, Any]:
    """Return inputs and values, ready for JSON.

    Args:
        folder: Folder into which verl and OpenRLHF were installed.
    """
    functions = loaded(folder)
    losses = {}
    for name, (function, arguments) in LOSSES.items():
        inputs = make_inputs()
        inputs["logprobs"].requires_grad_()
        loss = functions[function](inputs, **arguments)
        (gradient,) = torch.autograd.grad(loss, inputs["logprobs"])
        losses[name] = {"loss": loss.item(), "gradient": gradient.tolist()}
    inputs = make_inputs()
    advantages = {"trl": functions["trl_advantages"](inputs["rewards"], GROUP_SIZE).tolist()}
    for name, arguments in ESTIMATORS.items():
        advantages[f"verl {name}"] = functions["verl_advantages"](inputs, name, **arguments).tolist()
    plain = functions["verl_advantages"](inputs, "grpo", norm_adv_by_std_in_grpo=False)
    advantages["verl dr_grpo"] = plain.tolist()
    advantages["verl gae"] = functions["verl_gae"](inputs, gamma=0.9, lam=0.8).tolist()
    return {
        "made by": "scripts/compare_losses --record",
        "versions": {"trl": importlib.metadata.version("trl")}
        | {name: _version(folder, name) for name in ("verl", "openrlhf")}
        | {"torch": torch.__version__},
        "inputs": {name: values.tolist() for name, values in make_inputs().items()},
        "losses": losses,
        "advantages": advantages,
    }


def _version(folder: Path, name: str) -> str:
    """Return the version of a package that was installed into a folder."""
    (distribution,) = importlib.metadata.distributions(name=name, path=[str(folder)])
    return distribution.version


if __name__ == "__main__":
    values = library_values(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(values) + "\n")
    print(
        f"{len(values['losses'])} losses and {len(values['advantages'])} estimators of {values['versions']}"
    )
