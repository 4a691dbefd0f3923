"""The options of the optimizer and of the trainer's memory."""

from dataclasses import dataclass
from functools import partial

from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Range, Section, option

DECAYS_TO_ZERO = ("linear", "cosine")  # schedules that end at 0, at the run's last step
BELOW_ONE = Range("must lie between 0 and 1 (without 1)", lambda value: 0 <= value < 1)

_optimizer = partial(option, panel="Optimizer", portable=True)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW and its schedule. `num_warmup_steps` counts optimizer steps."""

    learning_rate: float = _optimizer(2e-6, "Peak learning rate of AdamW.", range=POSITIVE, everyday=True)
    lr_scheduler: str = _optimizer(
        "constant_with_warmup",
        "How it changes over the run.",
        choices="async_grpo.training.optimizer:LR_SCHEDULES",
        everyday=True,
    )
    num_warmup_steps: int = _optimizer(10, "Optimizer steps of linear warm-up.", range=NOT_NEGATIVE)
    max_grad_norm: float = _optimizer(1.0, "Gradient norm is clipped to this.", range=POSITIVE)
    nonfinite_steps: int = _optimizer(
        3,
        "Steps in a row whose gradient is not finite that are left out; the next one ends the run.",
        range=NOT_NEGATIVE,
    )
    weight_decay: float = _optimizer(0.0, "AdamW weight decay.", range=NOT_NEGATIVE)
    adam_beta1: float = _optimizer(0.9, "AdamW: decay of the mean gradient.", range=BELOW_ONE)
    adam_beta2: float = _optimizer(0.95, "AdamW: decay of the mean squared gradient.", range=BELOW_ONE)
    adam_epsilon: float = _optimizer(1e-8, "AdamW: added to the denominator.", range=POSITIVE)
    critic_learning_rate: float = option(
        1e-5, "Peak learning rate of the value head (estimator gae).", "Critic", range=POSITIVE, portable=True
    )
    dtype: str = _optimizer(
        "auto",
        "Compute type; auto: bfloat16 on GPUs, float32 elsewhere.",
        choices=("auto", "float32", "bfloat16"),
        everyday=True,
    )
    optimizer: str = _optimizer(
        "adamw",
        "adamw_8bit keeps AdamW's moments in 8 bits: a quarter of their memory; needs the extra adamw-8bit.",
        choices=("adamw", "adamw_8bit"),
    )
    gradient_checkpointing: bool = _optimizer(
        False, "Recompute the activations of each layer: less memory, a third more time."
    )
    cpu_offload: bool = _optimizer(
        False,
        "Keep the trainer's weights, gradients and moments in main memory: less GPU memory, slower steps.",
    )
    fsdp_size: int = _optimizer(
        0,
        "Ranks that share one copy of the weights, those of a node, say: only gradients cross nodes; 0: all ranks.",
        range=NOT_NEGATIVE,
    )
    torch_compile: bool = _optimizer(
        False, "Compile the layers: quicker steps, a slower first one; needs a C++ compiler on CPUs."
    )
    logprob_chunk_size: int = _optimizer(1024, "Tokens per slice of the vocabulary head.", range=POSITIVE)
    update_stats: bool = option(
        True,
        "Log norms and ratios of the weight update (one more copy of the shards).",
        "Output",
        portable=True,
    )
