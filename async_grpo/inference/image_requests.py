"""Prompts with images for vLLM, and the check that vLLM expands them to the trainer's token ids.

vLLM gets one placeholder token for each image, and expands it with its own copy of the model's processor. If it got the
expanded token ids, it would expand them a second time.
"""

import asyncio
import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from vllm.inputs import TokensInput, tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from async_grpo.allowed_tokens import AllowedTokens, packed_mask, unpacked_mask
from async_grpo.errors import ConfigurationError, ImagesDiffer
from async_grpo.messages import SharedRunSettings
from async_grpo.options.fields import refuse
from async_grpo.processes.image_files import read_image
from async_grpo.types import ImageReference

SHOWN_TOKENS = 4  # number of token ids around a difference that a message shows


def image_arguments(settings: SharedRunSettings) -> dict[str, Any]:
    """Return the arguments of vLLM's engine for a model that reads images.

    Raises:
        ConfigurationError: torchvision is missing, with which vLLM reads images, or does not fit torch.
    """
    try:
        import_module("torchvision")  # only models that read images need it
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"vLLM reads the images of this model with torchvision, which cannot be imported ({error}): install the build "
            "of torchvision that belongs to the engine's torch (docs/images.md)"
        ) from error
    return {
        # To expand the placeholders, vLLM uses the model's processor, which needs the tokenizer
        "skip_tokenizer_init": False,
        # With a limit of 0 images, vLLM would not load the vision tower. But every weight update contains the tower's
        # weights
        "limit_mm_per_prompt": {"image": max(1, settings.most_images), "video": 0},
        # No cache is needed, because each image is processed once per group and shared by all members
        "mm_processor_cache_gb": 0,
    }


def check_image_processor(engine: AsyncLLM, settings: SharedRunSettings) -> None:
    """Check that the engine processes images as the trainer does.

    transformers has two processors for many models, by torchvision and by Pillow, whose pixel values differ.

    Raises:
        ConfigurationError: The engine's image processor is of another class than the trainer's.
    """
    info: Any = engine.renderer.get_mm_processor().info
    name = type(info.get_image_processor()).__name__
    refuse(
        name != settings.image_processor,
        f"the engine processes images by {name}, the trainer by {settings.image_processor}, whose pixels differ: install "
        "torchvision in the environments of both",
    )


def unexpanded(token_ids: Sequence[int], images: Sequence[ImageReference], image_token_id: int) -> list[int]:
    """Return token ids with a single placeholder for each image.

    >>> images = [ImageReference("", "", 2), ImageReference("", "", 3)]
    >>> unexpanded([1, 9, 9, 2, 9, 9, 9], images, image_token_id=9)
    [1, 9, 2, 9]

    Raises:
        ImagesDiffer: The token ids have another number of placeholders than the images need.
    """
    num_places = sum(token_id == image_token_id for token_id in token_ids)
    num_needed = sum(image.num_tokens for image in images)
    if num_places != num_needed:
        raise ImagesDiffer(
            f"a prompt has {num_places} image tokens, and its {len(images)} images have {num_needed}: the placeholders "
            "were expanded twice, or not at all"
        )
    remaining = iter(images)
    num_skipped = 0
    short = []
    for token_id in token_ids:
        if num_skipped:
            num_skipped -= 1
            continue
        if token_id == image_token_id:
            num_skipped = next(remaining).num_tokens - 1
        short.append(token_id)
    return short


class ImageRequest:
    """The prompt of a group with images, as vLLM reads it. Its images are read and processed once for all members."""

    def __init__(self, engine_input: Any) -> None:
        self._engine_input = engine_input

    @classmethod
    async def of(
        cls,
        engine: AsyncLLM,
        token_ids: np.ndarray,
        images: Sequence[ImageReference],
        image_token_id: int,
    ) -> "ImageRequest":
        """Read the images of a prompt (L,), and let vLLM expand its placeholders.

        Raises:
            ConfigurationError: An image cannot be read on this node.
            ImagesDiffer: An image changed since the start of the run, or vLLM expands the prompt to other token ids.
        """
        expected = token_ids.tolist()
        decoded_images = [await asyncio.to_thread(read_image, image) for image in images]
        prompt = {
            "prompt_token_ids": unexpanded(expected, images, image_token_id),
            "multi_modal_data": {"image": decoded_images},
            "multi_modal_uuids": {"image": [image.digest for image in images]},
        }
        (engine_input,) = await engine.renderer.render_cmpl_async([prompt])
        check_expanded(engine_input["prompt_token_ids"], expected)
        return cls(engine_input)

    def input(self, first_tokens: Sequence[int], cache_salt: str) -> TokensInput:
        """Return the prompt of one member.

        Args:
            first_tokens: Beginning of the completion that a lost engine had already sampled.
            cache_salt: Salt of vLLM's prefix cache.
        """
        return {
            **self._engine_input,
            "prompt_token_ids": [*self._engine_input["prompt_token_ids"], *first_tokens],
            "cache_salt": cache_salt,
        }


async def canary_prompt(engine: AsyncLLM, token_ids: np.ndarray, settings: SharedRunSettings) -> TokensInput:
    """Return a text (N,) of the canary as a prompt for vLLM, with its image if it has one.

    Raises:
        ConfigurationError: The image cannot be read on this node.
        ImagesDiffer: See `ImageRequest.of`.
    """
    image = settings.image_canary
    images = () if image is None else image.images_of(token_ids)
    if not images:
        return tokens_input(token_ids.tolist())
    request = await ImageRequest.of(engine, token_ids, images, settings.image_token_id)
    return request.input([], uuid.uuid4().hex)


def check_expanded(engine_token_ids: Sequence[int], token_ids: Sequence[int]) -> None:
    """Compare the token ids that the engine read with the trainer's, one by one.

    Raises:
        ImagesDiffer: They differ. The message shows the first difference.
    """
    engine_ids = list(engine_token_ids)
    expected_ids = list(token_ids)
    if engine_ids == expected_ids:
        return
    pairs = zip(engine_ids, expected_ids, strict=False)
    shortest = min(len(engine_ids), len(expected_ids))
    place = next((place for place, (left, right) in enumerate(pairs) if left != right), shortest)
    end = place + SHOWN_TOKENS
    raise ImagesDiffer(
        f"the engine reads a prompt of {len(engine_ids)} tokens, the trainer of {len(expected_ids)}; they differ from "
        f"token {place} on: {engine_ids[place:end]} and {expected_ids[place:end]}. The image processors of "
        "engine and trainer differ, or a placeholder was expanded twice"
    )


def without_tokens(
    allowed: AllowedTokens | None, num_tokens: int, token_ids: Sequence[int], vocab_size: int
) -> AllowedTokens:
    """Return the allowed tokens of a completion without some tokens, which the engine excludes from sampling.

    Args:
        allowed: The tokens that a grammar allowed; None if it allowed all.
        num_tokens: Number of tokens of the completion.
        token_ids: The excluded tokens.
        vocab_size: Size of the vocabulary.
    """
    num_words = -(-vocab_size // 32)
    bits = np.zeros(32 * num_words, np.uint8)
    bits[:vocab_size] = 1
    bits[list(token_ids)] = 0
    mask = np.packbits(bits, bitorder="little")
    if allowed is None:
        return AllowedTokens(np.zeros(num_tokens, np.int32), (packed_mask(mask),))
    masks = [packed_mask(mask)]
    for grammar_mask in allowed.masks:
        grammar_bits = np.zeros_like(mask)
        grammar_bytes = unpacked_mask(grammar_mask, vocab_size)
        grammar_bits[: len(grammar_bytes)] = grammar_bytes
        masks.append(packed_mask(grammar_bits & mask))
    # Shift the indices: ALL_TOKENS, which is -1, becomes 0, the index of the first mask
    return AllowedTokens(allowed.indices + np.int32(1), tuple(masks))
