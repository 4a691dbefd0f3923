"""The options of the optimizer and of the trainer's memory."""

from dataclasses import dataclass

from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Range, Section, option

DECAYS_TO_ZERO = ("linear", "cosine")  # schedules that end at 0, at the run's last step
BELOW_ONE = Range(0, 1 - 1e-12, False, "must lie between 0 and 1 (without 1)")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW and its schedule. `num_warmup_steps` counts optimizer steps."""

    learning_rate: float = option(
        2e-6, "Peak learning rate of AdamW.", "Optimizer", range=POSITIVE, everyday=True
    )
    lr_scheduler: str = option(
        "constant_with_warmup",
        "How it changes over the run.",
        "Optimizer",
        choices="async_grpo.training.optimizer:LR_SCHEDULES",
        everyday=True,
    )
    num_warmup_steps: int = option(10, "Optimizer steps of linear warm-up.", "Optimizer", range=NOT_NEGATIVE)
    max_grad_norm: float = option(1.0, "Gradient norm is clipped to this.", "Optimizer", range=POSITIVE)
    weight_decay: float = option(0.0, "AdamW weight decay.", "Optimizer", range=NOT_NEGATIVE)
    adam_beta1: float = option(0.9, "AdamW: decay of the mean gradient.", "Optimizer", range=BELOW_ONE)
    adam_beta2: float = option(
        0.95, "AdamW: decay of the mean squared gradient.", "Optimizer", range=BELOW_ONE
    )
    adam_epsilon: float = option(1e-8, "AdamW: added to the denominator.", "Optimizer", range=POSITIVE)
    critic_learning_rate: float = option(
        1e-5, "Peak learning rate of the value head (estimator gae).", "Critic", range=POSITIVE
    )
    dtype: str = option(
        "auto",
        "Compute type; auto: bfloat16 on GPUs, float32 elsewhere.",
        "Optimizer",
        choices=("auto", "float32", "bfloat16"),
        everyday=True,
    )
    gradient_checkpointing: bool = option(
        False, "Recompute activations: less memory, a third more time.", "Optimizer"
    )
    logprob_chunk_size: int = option(
        1024, "Tokens per slice of the vocabulary head.", "Optimizer", range=POSITIVE
    )
    update_stats: bool = option(
        True, "Log norms and ratios of the weight update (one more copy of the shards).", "Output"
    )
