"""The images of a run's prompts: the settings that a model that reads images needs, and options that do not fit it."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from async_grpo.config.run import RunConfig
from async_grpo.experience.dataset import Question
from async_grpo.experience.image_prompts import ImagePrompts
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.messages import ImageCanary
from async_grpo.modeling.auto_classes import reads_images
from async_grpo.modeling.image_models import ImageReader, special_token_ids, unsampled_token_ids
from async_grpo.modeling.load import load_config
from async_grpo.options.fields import refuse
from async_grpo.processes.image_files import IMAGE_MODEL_TYPES, RUN_IMAGES
from async_grpo.weights.canary import Canary

# Maximum number of images in a conversation with an environment, unless a row has more
ENVIRONMENT_IMAGES = 16
CANARY_PIXELS = 112  # width and height of the canary's image
CANARY_TEXT_TOKENS = 32  # number of tokens after the canary's image


def image_prompts(config: RunConfig, tokenizer: Any, renderer: PromptRenderer) -> ImagePrompts | None:
    """Return the object that renders prompts with images, or None if the model reads no images.

    Raises:
        ConfigurationError: The model folder has no image processor. Or an option needs a model that reads images, or
            does not work with one.
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
        config.sends_adapter,
        f"--lora-sync adapter: engines do not apply adapters to models that read images ({model.model_type}): use "
        "--lora-sync merged",
    )
    refuse(
        config.observation_coef > 0,
        f"--observation-coef {config.observation_coef}: the policy would learn to write the placeholders of an "
        f"environment's images, because the model reads images ({model.model_type}): leave the option out",
    )
    reader = ImageReader.load(config.model_name_or_path, model)
    folder = config.output_path / RUN_IMAGES
    return ImagePrompts(tokenizer, renderer, reader, model.image_token_id, folder)


def image_settings(
    config: RunConfig, images: ImagePrompts | None, questions: Sequence[Question], max_total_tokens: int
) -> dict[str, Any]:
    """Return the fields of `SharedRunSettings` about images; {} for a model that reads none.

    Args:
        config: The run's options.
        images: Renders prompts with images; None if the model reads none.
        questions: All questions of the run.
        max_total_tokens: Maximum length of prompt and completion together.
    """
    if images is None:
        return {}
    most_images = max(len(question.images) for question in questions)
    if config.environment is not None:
        # The environment's replies may have further images
        most_images = max(most_images, ENVIRONMENT_IMAGES)
    model = load_config(config.model_name_or_path)
    return {
        "image_token_id": model.image_token_id,
        "unsampled_token_ids": unsampled_token_ids(model),
        "most_images": most_images,
        "image_processor": images.processor_name,
        "image_canary": _image_canary(images, model, config.infinite_sampler_seed, max_total_tokens - 1),
    }


def _image_canary(images: ImagePrompts, model: Any, seed: int, longest: int) -> ImageCanary | None:
    """Return the text of the canary that has an image, a picture of random pixels; None if it has over `longest` tokens."""
    pixels = np.random.default_rng(seed).integers(0, 256, (CANARY_PIXELS, CANARY_PIXELS, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    image = images.add(file.getvalue())
    placeholders = [model.image_token_id] * image.num_tokens
    text = Canary.text(
        model.get_text_config().vocab_size,
        CANARY_TEXT_TOKENS,
        seed,
        special_token_ids(model),
    )
    token_ids = [
        model.vision_start_token_id,
        *placeholders,
        model.vision_end_token_id,
        *text.tolist(),
    ]
    return ImageCanary(tuple(token_ids), image) if len(token_ids) <= longest else None
