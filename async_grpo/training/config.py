"""The options of the optimizer and of the trainer's memory."""

from dataclasses import dataclass
from functools import partial

from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Range, Section, option

DECAYS_TO_ZERO = ("linear", "cosine")  # schedules that reach 0 at the last step of the run
BELOW_ONE = Range("must lie between 0 and 1 (without 1)", lambda value: 0 <= value < 1)

_optimizer = partial(option, panel="Optimizer", portable=True)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Options of AdamW, its schedule, and the trainer's memory."""

    learning_rate: float = _optimizer(2e-6, "Peak learning rate of AdamW.", range=POSITIVE, everyday=True)
    lr_scheduler: str = _optimizer(
        "constant_with_warmup",
        "Schedule of the learning rate over the run.",
        choices="async_grpo.training.optimizer:LR_SCHEDULES",
        everyday=True,
    )
    num_warmup_steps: int = _optimizer(
        10, "Number of optimizer steps of the linear warm-up.", range=NOT_NEGATIVE
    )
    max_grad_norm: float = _optimizer(1.0, "Clip the norm of the gradient to this value.", range=POSITIVE)
    nonfinite_steps: int = _optimizer(
        3,
        "Number of consecutive steps with a gradient that is not finite which are skipped; the next one ends the run.",
        range=NOT_NEGATIVE,
    )
    weight_decay: float = _optimizer(0.0, "Weight decay of AdamW.", range=NOT_NEGATIVE)
    adam_beta1: float = _optimizer(0.9, "Decay of the mean gradient in AdamW.", range=BELOW_ONE)
    adam_beta2: float = _optimizer(0.95, "Decay of the mean squared gradient in AdamW.", range=BELOW_ONE)
    adam_epsilon: float = _optimizer(1e-8, "Number added to the denominator in AdamW.", range=POSITIVE)
    critic_learning_rate: float = option(
        1e-5, "Peak learning rate of the value head (estimator gae).", "Critic", range=POSITIVE, portable=True
    )
    dtype: str = _optimizer(
        "auto",
        "Compute dtype; auto is bfloat16 on GPUs, float32 elsewhere.",
        choices=("auto", "float32", "bfloat16"),
        everyday=True,
    )
    optimizer: str = _optimizer(
        "adamw",
        "Optimizer; adamw_8bit keeps the moments in 8 bits, a quarter of the memory, and needs the extra adamw-8bit.",
        choices=("adamw", "adamw_8bit"),
    )
    gradient_checkpointing: bool = _optimizer(
        False, "Recompute the activations of each layer, which saves memory and takes a third more time."
    )
    cpu_offload: bool = _optimizer(
        False,
        "Keep the trainer's weights, gradients and moments in main memory, which saves GPU memory and slows steps.",
    )
    fsdp_size: int = _optimizer(
        0,
        "Number of ranks that share one copy of the weights (0: all). With those of a node, only gradients cross nodes.",
        range=NOT_NEGATIVE,
    )
    torch_compile: bool = _optimizer(
        False,
        "Compile the layers, which makes steps faster and the first one slower; needs a C++ compiler on CPUs.",
    )
    logprob_chunk_size: int = _optimizer(
        1024, "Number of tokens for which logits exist at once.", range=POSITIVE
    )
    update_stats: bool = option(
        True,
        "Log norms and ratios of the weight update, which takes one more copy of the shards.",
        "Output",
        portable=True,
    )
