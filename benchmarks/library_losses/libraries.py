"""The loss functions of TRL, verl and OpenRLHF, called without their trainers.

verl and OpenRLHF are installed without their dependencies. Their modules import other packages besides torch
(configuration classes, Ray, DeepSpeed), which do not take part in the computation of a loss. Empty modules replace
these packages.
"""

import importlib
import sys
from collections import defaultdict
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]


class OneProcess:
    """The part of an Accelerator that TRL's loss uses, for a single process."""

    num_processes = 1

    def gather(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def pad_across_processes(self, values: Tensor, dim: int, pad_index: float) -> Tensor:
        """Return the values."""
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        """Return the values."""
        return values


def trl_loss(inputs: Inputs, *, use_vllm: bool = False, **settings: Any) -> Tensor:
    """Return `GRPOTrainer._compute_loss` for these log-probs, with the defaults of `GRPOConfig`.

    Args:
        inputs: See `values.make_inputs`.
        use_vllm: Whether an engine sampled the tokens. The policy of the ratio is then the current one, and the importance
            weights compare it with the engine's, as in TRL with one optimizer step for each generation. Otherwise the
            engine's log-probs are those of the policy in the ratio.
        settings: Changed fields of `GRPOConfig`.
    """
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    config = {field.name: field.default for field in fields(GRPOConfig)} | settings
    trainer = SimpleNamespace(**config)
    trainer.args = SimpleNamespace(**config | {"steps_per_generation": 1})
    trainer.epsilon_low = trainer.epsilon
    trainer.epsilon_high = trainer.epsilon if trainer.epsilon_high is None else trainer.epsilon_high
    trainer.use_vllm = use_vllm
    trainer.aux_loss_enabled = False
    trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps = 1
    trainer.accelerator = OneProcess()
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        inputs["logprobs"],
        inputs["entropy"],
        None,
    )
    trainer.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    trainer.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, trainer)

    mask = inputs["mask"]
    batch = {
        "prompt_ids": torch.zeros(len(mask), 1),
        "prompt_mask": torch.ones(len(mask), 1),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": inputs["advantages"],
        "ref_per_token_logps": inputs["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if use_vllm:
        batch["sampling_per_token_logps"] = inputs["behaviour"]
        batch["importance_sampling_ratio"] = _trl_importance_weights(inputs, config)
    else:
        batch["old_per_token_logps"] = inputs["behaviour"]
    return GRPOTrainer._compute_loss(trainer, trainer.model, batch)


def _trl_importance_weights(inputs: Inputs, config: dict[str, Any]) -> Tensor:
    """Return TRL's importance weights.

    The trainer computes them in a method that also generates the samples, so its formula is repeated here.
    """
    log_ratio = (inputs["logprobs"].detach() - inputs["behaviour"]) * inputs["mask"]
    level, mode = config["vllm_importance_sampling_mode"].split("_")
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    weights = log_ratio.exp()
    low = config["vllm_importance_sampling_clip_min"]
    high = config["vllm_importance_sampling_clip_max"]
    if mode == "truncate":
        return weights.clamp(min=low, max=high)
    lowest = 0.0 if low is None else low
    return weights.masked_fill((weights < lowest) | (weights > high), 0.0)


def trl_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Return TRL's advantages with `scale_rewards="group"`, from its own standard deviation."""
    from trl.trainer.utils import nanstd

    grouped = rewards.view(-1, group_size)
    deviation = nanstd(grouped, dim=1).repeat_interleave(group_size)
    return (rewards - grouped.mean(dim=1).repeat_interleave(group_size)) / (deviation + 1e-4)


def load_verl(folder: Path) -> Any:
    """Return verl's module `core_algos`. verl was installed into `folder` without its dependencies."""
    _stand_in("omegaconf", DictConfig=dict)
    _stand_in("tensordict", TensorDict=dict)
    _package("verl", folder / "verl")
    _package("verl.utils", folder / "verl" / "utils")
    _stand_in("verl.utils.device", get_device_name=lambda: "cpu", get_torch_device=lambda: torch.cpu)
    groupwise = importlib.import_module("verl.utils.groupwise")
    sys.modules["verl.utils"].__dict__.update(
        as_torch_index=groupwise.as_torch_index, group_mean_std=groupwise.group_mean_std
    )
    _package("verl.trainer", folder / "verl" / "trainer")
    _package("verl.trainer.ppo", folder / "verl" / "trainer" / "ppo")
    _stand_in("verl.trainer.config", AlgoConfig=type("AlgoConfig", (), {}))
    _package("verl.workers", folder / "verl" / "workers")
    _stand_in("verl.workers.config", ActorConfig=VerlActorConfig)
    return importlib.import_module("verl.trainer.ppo.core_algos")


class VerlActorConfig(SimpleNamespace):
    """The fields of verl's `ActorConfig` that its losses read."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or the default if it is not set."""
        return getattr(self, name, default)


def verl_loss(
    inputs: Inputs, name: str, *, aggregation: str = "token-mean", verl: Any, **settings: Any
) -> Tensor:
    """Return one of verl's policy losses, with the defaults of its configuration. The ratio is that to the engine."""
    config = VerlActorConfig(
        **{
            "clip_ratio": 0.2,
            "clip_ratio_low": None,
            "clip_ratio_high": None,
            "clip_ratio_c": 3.0,
            "global_batch_info": {},
            "tau_pos": 1.0,
            "tau_neg": 1.05,
            "policy_loss": SimpleNamespace(dro_beta=0.05, kl_cov_ratio=0.1, ppo_kl_coef=1.0),
        }
        | settings
    )
    loss, _ = verl.get_policy_loss_fn(name)(
        old_log_prob=inputs["behaviour"],
        log_prob=inputs["logprobs"],
        advantages=inputs["advantages"][:, None].expand_as(inputs["mask"]),
        response_mask=inputs["mask"],
        loss_agg_mode=aggregation,
        config=config,
    )
    return loss


def verl_kl(inputs: Inputs, kind: str, *, verl: Any) -> Tensor:
    """Return the token mean of one of verl's KL penalties."""
    kl = verl.kl_penalty(inputs["logprobs"], inputs["reference"], kind)
    return (kl * inputs["mask"]).sum() / inputs["mask"].sum()


def verl_advantages(inputs: Inputs, name: str, *, verl: Any, **settings: Any) -> Tensor:
    """Return the advantages of one of verl's estimators, with the reward on the last token of each sample."""
    mask = inputs["mask"].to(inputs["rewards"].dtype)
    index = [int(group) for group in inputs["groups"]]
    advantages, _ = verl.get_adv_estimator_fn(name)(
        token_level_rewards=_rewards_on_last_tokens(inputs), response_mask=mask, index=index, **settings
    )
    return advantages * mask


def verl_gae(inputs: Inputs, gamma: float, lam: float, *, verl: Any) -> Tensor:
    """Return verl's whitened advantages with a critic, with the reward on the last token of each sample."""
    mask = inputs["mask"].to(inputs["rewards"].dtype)
    advantages, _ = verl.compute_gae_advantage_return(
        _rewards_on_last_tokens(inputs), inputs["values"], mask, gamma, lam
    )
    return advantages * mask


def _rewards_on_last_tokens(inputs: Inputs) -> Tensor:
    mask = inputs["mask"]
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    rewards = torch.zeros_like(inputs["logprobs"].detach())
    rewards[torch.arange(len(mask)), last] = inputs["rewards"]
    return rewards


def load_openrlhf(folder: Path) -> Any:
    """Return OpenRLHF's module of losses. OpenRLHF was installed into `folder` without its dependencies."""
    _stand_in("deepspeed")
    _package("openrlhf", folder / "openrlhf")
    _package("openrlhf.models", folder / "openrlhf" / "models")
    return importlib.import_module("openrlhf.models.loss")


def openrlhf_loss(inputs: Inputs, *, openrlhf: Any, **settings: Any) -> Tensor:
    """Return OpenRLHF's policy loss. The ratio is that to the proximal policy, which OpenRLHF calls old."""
    loss, *_ = openrlhf.PolicyLoss(**settings)(
        inputs["logprobs"],
        inputs["proximal"],
        inputs["advantages"][:, None].expand_as(inputs["mask"]),
        action_mask=inputs["mask"],
        rollout_log_probs=inputs["behaviour"],
    )
    return loss


def _package(name: str, folder: Path) -> None:
    """Make a package whose submodules are imported from a folder, without running its own `__init__`."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def _stand_in(name: str, **attributes: Any) -> None:
    """Register an empty module with these attributes under a name."""
    module = ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


def loaded(folder: Path) -> dict[str, Any]:
    """Return the functions of all three libraries by name."""
    verl = load_verl(folder)
    openrlhf = load_openrlhf(folder)
    for name in ("omegaconf", "tensordict", "deepspeed"):
        # TRL checks which packages are imported, and would take an empty module for the real package
        del sys.modules[name]
    return {
        "trl": trl_loss,
        "trl_advantages": trl_advantages,
        "verl": partial(verl_loss, verl=verl),
        "verl_kl": partial(verl_kl, verl=verl),
        "verl_advantages": partial(verl_advantages, verl=verl),
        "verl_gae": partial(verl_gae, verl=verl),
        "openrlhf": partial(openrlhf_loss, openrlhf=openrlhf),
    }
