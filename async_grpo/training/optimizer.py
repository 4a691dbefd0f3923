"""AdamW or Muon, and the learning-rate schedules. Steps are optimizer steps, counted from 0."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.critic import CriticModel
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.muon import MOMENTUM_BUFFER, MuonWithAdamW, split_parameters


def _warmup(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return (step + 1) / warmup_steps, at most 1. With step / warmup_steps, step 0 would have learning rate 0."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _decay_progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return 0 at the end of the warm-up, rising to 1 at `total_steps`, and 1 afterwards."""
    return min(1.0, max(0, step - warmup_steps) / (total_steps - warmup_steps))


def _inverse_sqrt(step: int, warmup_steps: int, total_steps: int) -> float:
    """Return sqrt(warmup_steps / step) after the warm-up (Vaswani et al. 2017, 5.3).

    Without a warm-up, return 1 / sqrt(step + 1).
    """
    if not warmup_steps:
        return 1 / math.sqrt(step + 1)
    return min(_warmup(step, warmup_steps, total_steps), math.sqrt(warmup_steps / max(1, step)))


# (step, warm-up steps, total steps) -> share of the peak learning rate
LR_SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": lambda *at: 1.0,
    "constant_with_warmup": _warmup,
    "linear": lambda *at: _warmup(*at) * (1 - _decay_progress(*at)),
    "cosine": lambda *at: _warmup(*at) * (1 + math.cos(math.pi * _decay_progress(*at))) / 2,
    "inverse_sqrt": _inverse_sqrt,
}


def _adamw_8bit() -> Callable[..., Optimizer]:
    """Return the class of AdamW with 8-bit moments, or raise ConfigurationError if it is not installed."""
    try:
        return importlib.import_module("torchao.optim").AdamW8bit
    except ImportError as error:
        raise ConfigurationError(
            f"--optimizer adamw_8bit: {error}; pip install 'async-grpo[adamw-8bit]', or choose adamw"
        ) from error


def optimizer_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return `step` and the moments of a parameter. Before the first step, create their initial values.

    The moments of AdamW are `exp_avg` and `exp_avg_sq`, that of Muon is `momentum_buffer`.
    """
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state and isinstance(optimizer, MuonWithAdamW) and optimizer.is_matrix(parameter):
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state[MOMENTUM_BUFFER] = torch.zeros_like(parameter)
    if not state:
        # The 8-bit optimizer of torchao stores moments in its own tensor type, which `_new_buffer` creates
        new_buffer: Any = getattr(optimizer, "_new_buffer", lambda like, signed: torch.zeros_like(like))
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = new_buffer(parameter, True)
        state["exp_avg_sq"] = new_buffer(parameter, False)
    return state


def create_moments(optimizer: Optimizer) -> None:
    """Create the initial moments of all parameters. Before the first step, a new optimizer has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer_state(optimizer, parameter)


def build_policy_optimizer(
    policy: PolicyModel, config: OptimizerConfig, total_steps: int = 0
) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer of the trained weights of the policy, and the schedule of its learning rates.

    The model (with LoRA, its adapters) is parameter group 0, and a value head is the last group. With Muon, group 0 has the
    matrices, and group 1 the rest of the model.

    Args:
        policy: The policy, sharded or not.
        config: The options of the optimizer.
        total_steps: Number of steps of the run. Some schedules decay to 0 at this step.
    """
    head_groups: list[dict[str, Any]] = []
    if policy.value_head is not None:
        head_groups = [{"params": list(policy.value_head.parameters()), "lr": config.critic_learning_rate}]
    if config.optimizer == "muon":
        matrices, remaining = split_parameters(policy)
        return _scheduled(
            MuonWithAdamW(matrices, [{"params": remaining}, *head_groups], config), config, total_steps
        )
    trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    optimizer = _adamw([{"params": trained}, *head_groups], config, config.learning_rate)
    return _scheduled(optimizer, config, total_steps)


def build_critic_optimizer(
    critic: CriticModel, config: OptimizerConfig, total_steps: int = 0
) -> tuple[Optimizer, LambdaLR]:
    """Return AdamW over the trained weights of a separate critic model, and its schedule.

    The peak learning rate is `--critic-learning-rate`. The critic is trained by AdamW even if Muon trains the policy.
    """
    trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    optimizer = _adamw([{"params": trained}], config, config.critic_learning_rate)
    return _scheduled(optimizer, config, total_steps)


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, learning_rate: float) -> Optimizer:
    """Return AdamW over parameter groups. A group without a learning rate gets `learning_rate`."""
    make_optimizer = _adamw_8bit() if config.optimizer == "adamw_8bit" else partial(AdamW, fused=True)
    return make_optimizer(
        groups,
        lr=learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def _scheduled(optimizer: Optimizer, config: OptimizerConfig, total_steps: int) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer with the schedule of its learning rates."""
    schedule = LR_SCHEDULES[config.lr_scheduler]
    warmup_steps = config.num_warmup_steps
    return optimizer, LambdaLR(optimizer, lambda step: schedule(step, warmup_steps, total_steps))
