"""Check a model's configuration and modules for properties that the packed forward does not support.

Properties that these rules do not know are detected by `forward_check`, which computes a few tokens with the loaded
model.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.auto_classes import model_mapping
from async_grpo.options.fields import is_number, nearest
from async_grpo.processes.image_files import IMAGE_MODEL_TYPES

# Names of configuration values with which a model scales or caps its attention scores or the logits of its linear head
SCALED_HEAD = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)
# Names of configuration values that make a training forward random. Dropouts of heads for other tasks are allowed,
# because a causal language model does not have these heads
RANDOMNESS = re.compile(r"drop|jitter|stochastic|noise")
OTHER_HEADS = re.compile(r"classif|summary|seq_pair")
# Types of rotary positions that transformers knows. `su` is the older name of longrope
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS, "su")
ROPE_NUMBERS = ("rope_theta", "factor")
# Values of `model_type` of models that cut an image into several tiles
TILED_IMAGE_MODELS = ("idefics3", "smolvlm")
# Values of `model_type` of models in which the tokens of an image attend to each other in both directions
BIDIRECTIONAL_IMAGE_MODELS = ("gemma3",)
WINDOWED_LAYER = "sliding_attention"  # value in `layer_types` for a layer with a sliding window


def check_packable(model: PreTrainedModel) -> None:
    """Check that the packed forward supports a model's attention, positions and head.

    Raises:
        ConfigurationError: A property is not supported. The message names it, its value, and a way out.
    """
    _check_class(type(model))
    _check_values(model.config.get_text_config())
    dropout_rates = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    rate = max(dropout_rates, default=0.0)
    if rate:
        raise ConfigurationError(
            f"the model has dropout {rate}: its log-probs would be random in training; set it to 0 in config.json"
        )


def check_packable_configuration(config: PreTrainedConfig) -> None:
    """Make the checks of `check_packable` that need only the configuration, before the model is built.

    Raises:
        ConfigurationError: transformers has no causal language model of this kind, or a property is not supported.
    """
    mapping = model_mapping(config)
    if config.model_type in TILED_IMAGE_MODELS:
        raise ConfigurationError(
            f"models of the type {config.model_type!r} cut an image into tiles, with a different text around each, and the "
            f"prompts of this library have one run of tokens for each image: give a model of the types "
            f"{', '.join(IMAGE_MODEL_TYPES)}"
        )
    if config.model_type in BIDIRECTIONAL_IMAGE_MODELS:
        raise ConfigurationError(
            f"in models of the type {config.model_type!r}, the tokens of an image attend to each other in both directions, "
            f"and packed attention is causal: give a model of the types {', '.join(IMAGE_MODEL_TYPES)}, or for texts alone "
            "the folder of its language model"
        )
    if type(config) not in mapping:
        raise ConfigurationError(
            f"transformers has no causal language model of the model_type {config.model_type!r}: give a text model of "
            f"a family in docs/models.md, or a model that reads images of the types {', '.join(IMAGE_MODEL_TYPES)}"
        )
    model_class = mapping[type(config)]
    # For a few configurations, transformers has several classes to choose from
    if not isinstance(model_class, tuple):
        _check_class(model_class)
    _check_values(config.get_text_config())


def _check_class(model_class: type[PreTrainedModel]) -> None:
    """Raise ConfigurationError if a model's attention is not called through transformers' attention interface."""
    if not model_class._supports_attention_backend:
        raise ConfigurationError(
            f"{model_class.__name__} does not use transformers' attention interface, so it cannot be packed; use a "
            "model of another family (docs/models.md lists them)"
        )


def _check_values(config: PreTrainedConfig) -> None:
    _check_chunks(config)
    _check_layers(config)
    _check_rope(config)
    _check_head(config)
    _check_deterministic(config)


def _check_chunks(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError for dual chunk attention, which vLLM computes but transformers does not."""
    chunks = getattr(config, "dual_chunk_attention_config", None)
    if not chunks:
        return
    way_out = "use a model without it"
    length = chunks.get("chunk_size") if isinstance(chunks, Mapping) else None
    if type(length) is int:
        way_out += (
            f", or, if no sample of the run is longer than {length} tokens, remove dual_chunk_attention_config from "
            "config.json"
        )
    raise ConfigurationError(
        "packed attention sees a whole sequence, but the engines would attend by chunks (dual_chunk_attention_config in "
        f"config.json): {way_out}"
    )


def _check_layers(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if a layer does not attend to all earlier tokens, for example with a sliding window."""
    window = getattr(config, "sliding_window", None)
    implied_layers = ["full_attention" if window is None else WINDOWED_LAYER]
    layers = set(getattr(config, "layer_types", None) or implied_layers)
    if layers == {"full_attention"}:
        return
    way_out = "use a model with full attention"
    # The second way out changes the types of layers. It is not offered if layers of different types have different kinds
    # of rotary positions, because a layer's positions would change with its type
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    has_rope_by_layer = any(isinstance(value, Mapping) for value in rope_parameters.values())
    if type(window) is int and layers <= {"full_attention", WINDOWED_LAYER} and not has_rope_by_layer:
        way_out += (
            f", or, if no sample of the run is longer than {window} tokens, set sliding_window to null and all "
            "layer_types to full_attention in config.json"
        )
    raise ConfigurationError(
        f"packed attention sees a whole sequence, but the model has layers {sorted(layers)} and sliding_window "
        f"{window}; {way_out}"
    )


def _check_rope(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if the rotary positions are of an unknown kind, or depend on the length of the input.

    In a packed row, the longest sequence would determine the frequencies of all sequences.
    """
    _check_rope_numbers(config)
    for rope_type in rope_types(config):
        if rope_type not in ROPE_TYPES:
            raise ConfigurationError(
                f"config.json says rope_type {rope_type!r}, which transformers does not know; known: "
                f"{', '.join(ROPE_TYPES)}{nearest(rope_type, ROPE_TYPES)}"
            )
        if depends_on_length(rope_type):
            raise ConfigurationError(
                f"the model's rope_type {rope_type!r} computes other positions for long sequences than for short ones, "
                "which is impossible in a packed row; use a model with another rope_type, or, if no sample of the run "
                "is longer than the model's original context, set rope_parameters in config.json to the type of short "
                "sequences (default)"
            )


def _check_rope_numbers(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if the base or the factor of rotary positions is no number above 0.

    With 0, every log-prob would be NaN.
    """
    for name, value in _rope_values(config):
        if name in ROPE_NUMBERS and value is not None and not (is_number(value) and value > 0):
            raise ConfigurationError(
                f"config.json says {name} {value!r:.50} for the rotary positions: write a number above 0"
            )


def rope_types(config: PreTrainedConfig) -> list[str]:
    """Return every `rope_type` of the configuration. Some models have a different one for each type of layer."""
    types = {
        value
        for name, value in _rope_values(config)
        if name in ("rope_type", "type") and isinstance(value, str)
    }
    return sorted(types)


def _rope_values(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each parameter of the rotary positions, of all types of layers."""

    def values_of(parameters: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(parameters, Mapping):
            return
        for name, value in parameters.items():
            yield str(name), value
            yield from values_of(value)

    yield from values_of(getattr(config, "rope_parameters", None))
    yield from values_of(getattr(config, "rope_scaling", None))


def depends_on_length(rope_type: str) -> bool:
    """Return whether this rope type's frequencies in transformers depend on the length of the sequence.

    >>> [name for name in ("default", "linear", "dynamic", "yarn", "longrope", "llama3") if depends_on_length(name)]
    ['dynamic', 'longrope']
    """
    return "dynamic" in rope_type or rope_type in ("longrope", "su")  # `su` is the older name of longrope


def _check_head(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError if the model scales or caps its logits."""
    factors = {name: getattr(config, name, None) for name in SCALED_HEAD}
    changed = {name: value for name, value in factors.items() if value not in (None, 1)}
    if changed:
        raise ConfigurationError(
            f"log-probs are computed with a plain linear head, but the model has {changed}; use a model without this"
        )


def _check_deterministic(config: PreTrainedConfig) -> None:
    """Raise ConfigurationError for dropout and similar settings: each forward would compute a different policy."""
    random_values = dict(random_settings(config))
    if random_values:
        settings = ", ".join(f"{name} {value}" for name, value in random_values.items())
        raise ConfigurationError(
            f"the model has {settings}: its log-probs would be random in training; set it to 0 in config.json"
        )


def random_settings(config: PreTrainedConfig | Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each setting that makes a training forward random, including nested configurations."""
    values = config if isinstance(config, Mapping) else vars(config)
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig | Mapping):
            yield from random_settings(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        names_randomness = RANDOMNESS.search(str(name)) and not OTHER_HEADS.search(str(name))
        if is_number and value > 0 and names_randomness:
            yield str(name), float(value)
