"""The images of a run's prompts: what the model needs for them, and what is refused with them."""

from collections.abc import Sequence
from typing import Any

from async_grpo.config.run import RunConfig
from async_grpo.experience.dataset import Question
from async_grpo.experience.image_prompts import ImagePrompts
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.modeling.auto_classes import reads_images
from async_grpo.modeling.image_models import ImageReader, unsampled_token_ids
from async_grpo.modeling.load import load_config
from async_grpo.options.fields import refuse
from async_grpo.processes.image_files import IMAGE_MODEL_TYPES, RUN_IMAGES


def image_prompts(config: RunConfig, tokenizer: Any, renderer: PromptRenderer) -> ImagePrompts | None:
    """Return what renders prompts with images, or None if the model reads no images.

    Raises:
        ConfigurationError: The model folder has no image processor. Or an option needs a model that reads images, or does
            not work with one.
    """
    model = load_config(config.model_name_or_path)
    if not reads_images(model):
        refuse(
            config.freeze_vision,
            f"--freeze-vision: the model is of the type {model.model_type!r}, which reads no images; those that do: "
            f"{', '.join(IMAGE_MODEL_TYPES)}. Leave the option out",
        )
        return None
    refuse(
        config.has_lora,
        f"--lora-rank {config.lora_rank}: adapters are not supported for models that read images ({model.model_type}): "
        "train all weights, or the language model alone with --freeze-vision",
    )
    refuse(
        config.torch_compile,
        f"--torch-compile: the vision tower of a {model.model_type} is not compiled; leave the option out",
    )
    reader = ImageReader.load(config.model_name_or_path, model)
    folder = config.output_path / RUN_IMAGES
    return ImagePrompts(tokenizer, renderer, reader, model.image_token_id, folder)


def image_settings(
    config: RunConfig, images: ImagePrompts | None, questions: Sequence[Question]
) -> dict[str, Any]:
    """Return the fields of `SharedRunSettings` about images; {} for a model that reads none.

    Raises:
        ConfigurationError: A prompt has an image, and the run has an environment.
    """
    if images is None:
        return {}
    _refuse_environment(config, questions)
    model = load_config(config.model_name_or_path)
    return {
        "image_token_id": model.image_token_id,
        "unsampled_token_ids": unsampled_token_ids(model),
        "most_images": max(len(question.images) for question in questions),
        "image_processor": images.processor_name,
    }


def _refuse_environment(config: RunConfig, questions: Sequence[Question]) -> None:
    """Refuse an environment if a prompt has an image, because environments send texts only."""
    question = next((question for question in questions if question.images), None)
    if question is not None:
        refuse(
            config.environment is not None,
            f"{question.where}: the prompt has an image, and --environment {config.environment} reads texts only: drop the "
            "images, or run without an environment",
        )
