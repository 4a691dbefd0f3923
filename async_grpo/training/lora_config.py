"""The options of LoRA: which weights are trained, and how the adapter reaches the engines."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from async_grpo.options.fields import LIST, NOT_NEGATIVE, POSITIVE, Section, option, refuse

ALL_LINEAR = "all-linear"
# With LoRA, good learning rates are about ten times as high as for all weights (docs/lora.md)
LEARNING_RATE_FACTOR = 10

_lora = partial(option, panel="LoRA", portable=True)


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Section):
    """Options of LoRA (Hu et al. 2021): the model's weights W stay frozen, and the policy computes with W + s B A."""

    lora_rank: int = _lora(
        0,
        "Rank r of LoRA adapters, which are trained in place of the model's weights. 0 trains all weights. If "
        "--learning-rate is not set, LoRA trains with ten times its default.",
        range=NOT_NEGATIVE,
        everyday=True,
    )
    lora_alpha: float = _lora(
        32.0,
        "Scale of the adapters: s is this number divided by the rank, or by its square root with --lora-rslora.",
        range=POSITIVE,
    )
    lora_targets: str = _lora(
        ALL_LINEAR,
        "The layers that get an adapter: all-linear for all linear layers except the head, or comma-separated names such "
        "as q_proj,v_proj.",
        form=LIST,
    )
    lora_rslora: bool = _lora(
        False,
        "Divide --lora-alpha by the square root of the rank (Kalajdzievski 2023), so that a high rank learns as fast as a "
        "low one.",
    )
    init_adapter: str | None = option(
        None,
        "Folder of a LoRA adapter in peft's format with which the training begins. Its rank, scale and layers are used.",
        "LoRA",
    )
    load_in_4bit: bool = _lora(
        False,
        "Store the frozen weights of the trainer's linear layers in 4 bits (QLoRA, NF4), which takes 0.56 bytes for each "
        "weight in place of 2 or 4. The engines receive the values with which the trainer computes.",
    )
    lora_sync: str = _lora(
        "merged",
        "How the adapter reaches the engines: merged sends all weights with the adapter added to them, and works with "
        "every engine; adapter sends the adapter alone, and the engines add it in their layers.",
        choices=("merged", "adapter"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(
            not self.lora_target_names,
            f"--lora-targets {self.lora_targets!r} names no layer: give {ALL_LINEAR}, or names such as q_proj,v_proj",
        )

    @property
    def has_lora(self) -> bool:
        """Return whether an adapter is trained, and not all weights."""
        return self.lora_rank > 0 or self.init_adapter is not None

    @property
    def sends_adapter(self) -> bool:
        """Return whether syncs send the adapter alone, and not the weights to which it is added."""
        return self.has_lora and self.lora_sync == "adapter"

    @property
    def lora_target_names(self) -> list[str]:
        """Return the names in --lora-targets."""
        return [name.strip() for name in self.lora_targets.split(",") if name.strip()]

    @property
    def lora_scaling(self) -> float:
        """Return the factor s of W + s B A."""
        divisor = math.sqrt(self.lora_rank) if self.lora_rslora else self.lora_rank
        return self.lora_alpha / divisor


def with_lora_rate(options: Mapping[str, Any], explicit_names: Collection[str]) -> tuple[dict[str, Any], str]:
    """Multiply the default learning rate by LEARNING_RATE_FACTOR if an adapter is trained and the user set no rate.

    Args:
        options: The values of all options.
        explicit_names: Names of the options that the user has set.

    Returns:
        The options, and a message that names the new rate, or "" if the rate did not change.

    >>> with_lora_rate({"lora_rank": 16, "learning_rate": 2e-6}, explicit_names={"lora_rank"})[1]
    'LoRA: learning_rate=2e-05, which is 10 times the default (docs/lora.md)'
    """
    has_lora = options.get("lora_rank") or options.get("init_adapter")
    if not has_lora or "learning_rate" in explicit_names:
        return dict(options), ""
    rate = float(
        f"{LEARNING_RATE_FACTOR * options['learning_rate']:.12g}"
    )  # 2e-05 and not 1.9999999999999998e-05
    message = (
        f"LoRA: learning_rate={rate:g}, which is {LEARNING_RATE_FACTOR} times the default (docs/lora.md)"
    )
    return {**options, "learning_rate": rate}, message
