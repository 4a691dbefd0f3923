"""The options of the optimizer and of the trainer's memory."""

from dataclasses import dataclass
from functools import partial

from async_grpo.options.fields import BELOW_ONE, NOT_NEGATIVE, POSITIVE, Section, option

DECAYS_TO_ZERO = ("linear", "cosine")  # schedules that reach 0 at the last step of the run

_optimizer = partial(option, panel="Optimizer", portable=True)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Options of the optimizer, its schedule, and the trainer's memory."""

    learning_rate: float = _optimizer(
        2e-6, "Peak learning rate of the optimizer.", range=POSITIVE, everyday=True
    )
    lr_scheduler: str = _optimizer(
        "constant_with_warmup",
        "How the learning rate changes over the run.",
        choices="async_grpo.training.optimizer:LR_SCHEDULES",
        everyday=True,
    )
    num_warmup_steps: int = _optimizer(10, "Number of optimizer steps of linear warm-up.", range=NOT_NEGATIVE)
    max_grad_norm: float = _optimizer(
        1.0, "Maximum norm of the gradient. A larger gradient is scaled down to it.", range=POSITIVE
    )
    nonfinite_steps: int = _optimizer(
        3,
        "Steps in a row that may be skipped because their gradient is not finite; one more ends the run.",
        range=NOT_NEGATIVE,
    )
    weight_decay: float = _optimizer(0.0, "Weight decay of AdamW.", range=NOT_NEGATIVE)
    adam_beta1: float = _optimizer(0.9, "Decay rate of AdamW's running mean of gradients.", range=BELOW_ONE)
    adam_beta2: float = _optimizer(
        0.95, "Decay rate of AdamW's running mean of squared gradients.", range=BELOW_ONE
    )
    adam_epsilon: float = _optimizer(1e-8, "Number added to AdamW's denominator.", range=POSITIVE)
    critic_learning_rate: float = option(
        1e-5,
        "Peak learning rate of the critic: of the value head on the policy, or of the whole model in --critic-model.",
        "Critic",
        range=POSITIVE,
        portable=True,
    )
    dtype: str = _optimizer(
        "auto",
        "Data type of forward and backward passes. auto is bfloat16 on GPUs, and float32 elsewhere or for --policy flow.",
        choices=("auto", "float32", "bfloat16"),
        everyday=True,
    )
    optimizer: str = _optimizer(
        "adamw",
        "Optimizer. adamw_8bit stores AdamW's moments in 8 bits instead of 32, which saves three quarters of their "
        "memory. It needs the package extra adamw-8bit. muon trains the matrices of the layers by Muon, and embeddings, "
        "the output head, vectors and a value head by AdamW. Muon and AdamW use the same --learning-rate, except for "
        "a value head.",
        choices=("adamw", "adamw_8bit", "muon"),
    )
    muon_momentum: float = _optimizer(
        0.95, "Decay rate of Muon's running mean of gradients.", range=BELOW_ONE
    )
    gradient_checkpointing: bool = _optimizer(
        False,
        "Recompute the activations of each layer in the backward pass, which saves memory and takes a third more "
        "time.",
    )
    cpu_offload: bool = _optimizer(
        False,
        "Keep the trainer's weights, gradients and moments in main memory, which saves GPU memory and slows steps "
        "down.",
    )
    fsdp_size: int = _optimizer(
        0,
        "Number of ranks that share one copy of the weights. If it is the number of ranks per node, only gradients are "
        "sent between nodes. 0 shares one copy among all ranks.",
        range=NOT_NEGATIVE,
    )
    torch_compile: bool = _optimizer(
        False,
        "Compile the layers, which makes steps faster and the first step slower. On CPUs it needs a C++ compiler.",
    )
    logprob_chunk_size: int = _optimizer(
        1024, "Number of tokens for which the trainer computes logits at once.", range=POSITIVE
    )
    freeze_vision: bool = _optimizer(
        False,
        "Train only the language model of a model that reads images, and keep its vision tower as it is.",
    )
    update_stats: bool = option(
        True,
        "Log the norm of each weight update, absolute and relative to the weights. This takes memory for one more "
        "copy of the weight shards.",
        "Output",
        portable=True,
    )
