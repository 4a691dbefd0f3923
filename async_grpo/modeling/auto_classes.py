"""Choose the class of transformers that loads a model: for causal language models, or for models that read images."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from async_grpo.processes.image_files import IMAGE_MODEL_TYPES


def reads_images(config: PreTrainedConfig) -> bool:
    """Return whether a model of this configuration belongs to a family whose prompts may contain images."""
    return config.model_type in IMAGE_MODEL_TYPES


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers with which a model of this configuration is made."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def model_mapping(config: PreTrainedConfig) -> Any:
    """Return transformers' mapping from configurations to model classes, from which `auto_class` chooses."""
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if reads_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
