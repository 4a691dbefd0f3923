"""The rules for packable models that can be checked by configuration and modules.

All other problems are found by `forward_check`, which computes a few tokens with the loaded model.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from async_grpo.errors import ConfigurationError

# Factors and caps that a model applies to its logits, after the linear head
SCALED_HEAD = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
# Names of configuration values that make a training forward random. The dropouts of heads for other tasks do not count,
# because a causal language model does not have these heads
RANDOMNESS = re.compile(r"drop|jitter|stochastic|noise")
OTHER_HEADS = re.compile(r"classif|summary|seq_pair")


def check_packable(model: PreTrainedModel) -> None:
    """Check that the packed forward supports a model's attention, positions and head.

    Raises:
        ConfigurationError: Names the property of the model, its value, and the way out.
    """
    config = model.config.get_text_config()
    if not model._supports_attention_backend:
        raise ConfigurationError(
            f"{type(model).__name__} does not use transformers' attention interface, so it cannot be packed; use a "
            "model of another family (docs/models.md lists them)"
        )
    _check_layers(config)
    _check_rope(config)
    _check_head(config)
    _check_deterministic(model, config)


def _check_layers(config: PreTrainedConfig) -> None:
    """Refuse layers that do not attend to all tokens before a token."""
    window = getattr(config, "sliding_window", None)
    implied_layers = ["full_attention" if window is None else "sliding"]
    layers = set(getattr(config, "layer_types", None) or implied_layers)
    if layers != {"full_attention"}:
        raise ConfigurationError(
            "packed attention sees a whole sequence, but the model has layers "
            f"{sorted(layers)} and sliding_window {window}; use a model with full attention"
        )


def _check_rope(config: PreTrainedConfig) -> None:
    """Refuse rotary positions whose frequencies depend on the length of the input.

    In a packed row, the longest sequence would determine the frequencies of all sequences.
    """
    for rope_type in rope_types(config):
        if depends_on_length(rope_type):
            raise ConfigurationError(
                f"the model's rope_type {rope_type!r} computes other positions for long sequences than for short ones, "
                "which a packed row cannot; use a model with another rope_type, or, if no sample of the run is longer "
                "than the model's original context, set rope_parameters in config.json to the type that the short "
                "ones have (default)"
            )


def rope_types(config: PreTrainedConfig) -> list[str]:
    """Return every `rope_type` of the configuration; some models have one per type of layer."""
    types: set[str] = set()

    def collect(parameters: Any) -> None:
        if not isinstance(parameters, Mapping):
            return
        for name, value in parameters.items():
            if name in ("rope_type", "type") and isinstance(value, str):
                types.add(value)
            collect(value)

    collect(getattr(config, "rope_parameters", None))
    collect(getattr(config, "rope_scaling", None))
    return sorted(types)


def depends_on_length(rope_type: str) -> bool:
    """Return whether transformers computes other frequencies of this type for longer sequences.

    >>> [name for name in ("default", "linear", "dynamic", "yarn", "longrope", "llama3") if depends_on_length(name)]
    ['dynamic', 'longrope']
    """
    return "dynamic" in rope_type or rope_type in ("longrope", "su")  # `su` is the older name of longrope


def _check_head(config: PreTrainedConfig) -> None:
    """Refuse factors and caps on the logits."""
    factors = {name: getattr(config, name, None) for name in SCALED_HEAD}
    changed = {name: value for name, value in factors.items() if value not in (None, 1)}
    if changed:
        raise ConfigurationError(
            f"log-probs are those of a plain linear head, but the model has {changed}; use a model without"
        )


def _check_deterministic(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    """Refuse values that make a training forward random: each forward would compute another policy."""
    random_values = dict(random_settings(config))
    if random_values:
        settings = ", ".join(f"{name} {value}" for name, value in random_values.items())
        raise ConfigurationError(
            f"the model has {settings}: its log-probs would be random in training; set it to 0 in config.json"
        )
    dropout_rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    rate = max(dropout_rates, default=0.0)
    if rate:
        raise ConfigurationError(
            f"the model has dropout {rate}: its log-probs would be random in training; set it to 0 in config.json"
        )


def random_settings(config: PreTrainedConfig | Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each setting above 0 that makes a training forward random, also in nested configurations."""
    values = config if isinstance(config, Mapping) else vars(config)
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig | Mapping):
            yield from random_settings(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        names_randomness = RANDOMNESS.search(str(name)) and not OTHER_HEADS.search(str(name))
        if is_number and value > 0 and names_randomness:
            yield str(name), float(value)
