"""AdamW and the learning-rate schedules. A step is an optimizer step; step 0 is the first."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.policy import PolicyModel


@dataclass(frozen=True)
class OptimizerConfig:
    """`warmup_steps` and `total_steps` count optimizer steps; decay ends at `total_steps`.

    critic_learning_rate: of the value head, under the same schedule; None: the policy's.
    """

    learning_rate: float
    lr_scheduler: str = "constant_with_warmup"
    warmup_steps: int = 0
    total_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    critic_learning_rate: float | None = None

    def __post_init__(self) -> None:
        if self.lr_scheduler not in LR_SCHEDULES:
            raise ConfigurationError(
                f"unknown lr_scheduler {self.lr_scheduler!r}; choose one of {', '.join(LR_SCHEDULES)}"
            )
        if self.learning_rate <= 0 or self.weight_decay < 0 or self.warmup_steps < 0:
            raise ConfigurationError(
                f"learning_rate {self.learning_rate} must be positive, weight_decay {self.weight_decay} "
                f"and warmup_steps {self.warmup_steps} not negative"
            )
        if self.critic_learning_rate is not None and self.critic_learning_rate <= 0:
            raise ConfigurationError(
                f"critic_learning_rate {self.critic_learning_rate} must be positive; "
                f"leave it unset for the policy's {self.learning_rate}"
            )
        if self.lr_scheduler in DECAYS_TO_ZERO and self.total_steps <= self.warmup_steps:
            raise ConfigurationError(
                f"{self.lr_scheduler} decays until total_steps ({self.total_steps}), which must lie beyond "
                f"warmup_steps ({self.warmup_steps})"
            )


def _warmup(step: int, settings: OptimizerConfig) -> float:
    """(step + 1) / warmup_steps, at most 1: a ramp that began at 0 would waste the first step."""
    return min(1.0, (step + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0


def _decay_progress(step: int, settings: OptimizerConfig) -> float:
    """0 at the end of the warm-up, 1 at `total_steps` and ever after."""
    return min(1.0, max(0, step - settings.warmup_steps) / (settings.total_steps - settings.warmup_steps))


def _linear(step: int, settings: OptimizerConfig) -> float:
    return _warmup(step, settings) * (1 - _decay_progress(step, settings))


def _cosine(step: int, settings: OptimizerConfig) -> float:
    return _warmup(step, settings) * (1 + math.cos(math.pi * _decay_progress(step, settings))) / 2


def _inverse_sqrt(step: int, settings: OptimizerConfig) -> float:
    """sqrt(warmup_steps / step) after warm-up (Vaswani et al. 2017, 5.3); without, 1 / sqrt(step + 1)."""
    if not settings.warmup_steps:
        return 1 / math.sqrt(step + 1)
    return min(_warmup(step, settings), math.sqrt(settings.warmup_steps / max(1, step)))


LR_SCHEDULES: dict[str, Callable[[int, OptimizerConfig], float]] = {
    "constant": lambda step, settings: 1.0,
    "constant_with_warmup": _warmup,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
}
DECAYS_TO_ZERO = ("linear", "cosine")


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], settings: OptimizerConfig
) -> tuple[Optimizer, LambdaLR]:
    """AdamW over `parameters` (decay on all of them) and the schedule that scales its learning rates.

    As for torch's own optimizers, `parameters` may be groups: {"params": ..., "lr": ...}.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> _, schedule = build_optimizer([weight], OptimizerConfig(learning_rate=1.0, warmup_steps=4))
    >>> schedule.get_last_lr()
    [0.25]
    """
    optimizer = AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        foreach=True,
    )
    schedule = LR_SCHEDULES[settings.lr_scheduler]
    return optimizer, LambdaLR(optimizer, lambda step: schedule(step, settings))


def build_policy_optimizer(policy: PolicyModel, settings: OptimizerConfig) -> tuple[Optimizer, LambdaLR]:
    """`build_optimizer` over the policy, sharded or not: the model is group 0, a value head group 1."""
    groups: list[dict[str, Any]] = [{"params": list(policy.model.parameters())}]
    if policy.value_head is not None:
        lr = settings.critic_learning_rate or settings.learning_rate
        groups.append({"params": list(policy.value_head.parameters()), "lr": lr})
    return build_optimizer(groups, settings)
