"""Models that read images: their processor, their positions, and their packed forward.

The families are those of `IMAGE_MODEL_TYPES`. In the prompt, each image is a run of placeholder tokens. The image's
features replace their embeddings, and the positions of these tokens have three dimensions (Wang et al. 2024,
"Qwen2-VL", section 2.1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from async_grpo.errors import ConfigurationError, ImagesDiffer
from async_grpo.modeling.packed import PACKED_ATTENTION, Packing
from async_grpo.processes.image_files import IMAGE_MODEL_TYPES, read_image
from async_grpo.types import ImageReference

NO_FEATURE = -1  # entry of `ImageInputs.features` for a token of text
# Attention implementation of the vision tower. The tower itself keeps the images apart, so it needs no packed attention
VISION_ATTENTION = "sdpa"


def unsampled_token_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids of the tokens that stand for images and videos, which a policy must never sample.

    An engine would look for an image that the request does not have.
    """
    return tuple(sorted({config.image_token_id, config.video_token_id}))


def special_token_ids(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids of all tokens with a special meaning for images and videos, such as placeholders."""
    around = {config.vision_start_token_id, config.vision_end_token_id}
    return tuple(sorted({*unsampled_token_ids(config), *around}))


def attention_by_part(attention: str) -> dict[str, str]:
    """Return the attention implementations of language model and vision tower, in the form of `set_attn_implementation`."""
    vision = VISION_ATTENTION if attention == PACKED_ATTENTION else attention
    return {"text_config": attention, "vision_config": vision}


def freeze_vision(model: PreTrainedModel) -> None:
    """Freeze the vision tower, so that only the language model is trained."""
    model.base_model.visual.requires_grad_(False)


@dataclass(frozen=True)
class ImageInputs:
    """The images of one packed row, on the policy's device. F is the total number of features of all distinct images."""

    pixel_values: Float[Tensor, "patches values"]
    # Number of patches of each distinct image, as (in time, vertical, horizontal)
    grids: Int64[Tensor, "images 3"]
    # For each token, the index of the feature that replaces its embedding, among the F features; NO_FEATURE for text
    features: Int64[Tensor, " packed"]
    position_ids: Int64[Tensor, "3 packed"]  # position of each token: in time, vertical, horizontal

    def keys(self, input_ids: Int64[Tensor, " packed"]) -> Int64[Tensor, " packed"]:
        """Return token ids in which the placeholder tokens of each image have a number that no other image has.

        `Packing` computes equal beginnings of sequences once. Without this, two prompts with the same text and
        different images would look equal.
        """
        return torch.where(self.features == NO_FEATURE, input_ids, -1 - self.features)


class ImageReader:
    """Reads images: a model's image processor, and the number of tokens of an image in a prompt.

    Args:
        processor: An image processor of transformers.
        config: The model's configuration.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig) -> None:
        self._processor = processor
        # A token has this many patches in height and in width
        self._merge_size = config.vision_config.spatial_merge_size
        self._image_token_id = config.image_token_id

    @classmethod
    def load(cls, folder: str | Path, config: PreTrainedConfig) -> Self:
        """Load the image processor of a model folder.

        Raises:
            ConfigurationError: The folder has no image processor, or one that does not fit the model.
        """
        try:
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises any exception for broken or missing files
            raise ConfigurationError(
                f"the image processor in {folder} cannot be read ({error}): copy preprocessor_config.json or "
                "processor_config.json of the model into its folder"
            ) from error
        vision = config.vision_config
        expected = (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        actual = tuple(
            getattr(processor, name, None) for name in ("patch_size", "merge_size", "temporal_patch_size")
        )
        if actual != expected:
            raise ConfigurationError(
                f"the image processor in {folder} is a {type(processor).__name__} with patches of {actual}; the model's "
                f"config.json needs {expected} (patch_size, merge_size, temporal_patch_size). Images are supported for "
                f"models of the types {', '.join(IMAGE_MODEL_TYPES)} with their own processor"
            )
        return cls(processor, config)

    @property
    def name(self) -> str:
        """Return the name of the processor's class. Engines and trainer must use the same class."""
        return type(self._processor).__name__

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens of an image of this size in pixels.

        Raises:
            ConfigurationError: The processor refuses the size.
        """
        try:
            num_patches = self._processor.get_number_of_image_patches(height, width, {})
        except ValueError as error:
            raise ConfigurationError(f"the image of {width} x {height} pixels is refused: {error}") from error
        return num_patches // self._merge_size**2

    def inputs(
        self,
        images: Sequence[Sequence[ImageReference]],
        input_ids: Int[np.ndarray, " packed"],
        boundaries: Int[np.ndarray, " boundaries"],
        device: torch.device,
    ) -> ImageInputs:
        """Read the images of a packed row, and find the tokens of each. An image that occurs twice is read once.

        Args:
            images: The images of each sequence, in the order of their tokens.
            input_ids: Token ids of all sequences end to end.
            boundaries: Boundaries of the sequences.
            device: The device of the result.

        Raises:
            ImagesDiffer: The placeholders in the tokens are not those of the images.
        """
        references = {image.digest: image for sequence_images in images for image in sequence_images}
        distinct = list(references.values())
        processed = self._processor(images=[read_image(image) for image in distinct], return_tensors="pt")
        grids = processed["image_grid_thw"]
        numbers = {image.digest: number for number, image in enumerate(distinct)}
        first_features = np.cumsum([0, *(image.num_tokens for image in distinct)])
        features = np.full(len(input_ids), NO_FEATURE, np.int64)
        position_ids = np.empty((3, len(input_ids)), np.int64)
        for sequence_images, (begin, end) in zip(images, pairwise(boundaries.tolist()), strict=True):
            first_tokens = _first_tokens(input_ids[begin:end], sequence_images, self._image_token_id)
            spans = []
            for image, first_token in zip(sequence_images, first_tokens, strict=True):
                number = numbers[image.digest]
                place = begin + first_token
                features[place : place + image.num_tokens] = first_features[number] + np.arange(
                    image.num_tokens
                )
                _, rows, columns = (grids[number] // grids.new_tensor([1, *[self._merge_size] * 2])).tolist()
                if rows * columns != image.num_tokens:
                    raise ImagesDiffer(
                        f"the image processor makes {rows * columns} tokens of {image.path}, for which the prompt has "
                        f"{image.num_tokens} placeholders"
                    )
                spans.append(ImageSpan(first_token, rows, columns))
            position_ids[:, begin:end] = token_positions(end - begin, spans)
        return ImageInputs(
            pixel_values=processed["pixel_values"].to(device),
            grids=grids.to(device),
            features=torch.tensor(features, device=device),
            position_ids=torch.tensor(position_ids, device=device),
        )


@dataclass(frozen=True)
class ImageSpan:
    """The position and size of an image in a sequence. Its tokens form a rectangle."""

    begin: int  # index of the first token in the sequence
    rows: int
    columns: int


def token_positions(num_tokens: int, spans: Sequence[ImageSpan]) -> Int64[np.ndarray, "3 tokens"]:
    """Return the positions of a sequence's tokens: in time, vertical, horizontal.

    A token of text has three equal numbers, which grow by 1 from token to token. All tokens of an image have the same
    number in time; their vertical and horizontal numbers count from there. The text after the image continues after the
    largest of these numbers.

    >>> token_positions(7, [ImageSpan(begin=1, rows=2, columns=2)]).tolist()
    [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    """
    positions = np.empty((3, num_tokens), np.int64)
    next_position = 0
    place = 0
    for span in spans:
        num_text_tokens = span.begin - place
        positions[:, place : span.begin] = next_position + np.arange(num_text_tokens)
        next_position += num_text_tokens
        place = span.begin + span.rows * span.columns
        positions[0, span.begin : place] = next_position
        positions[1, span.begin : place] = next_position + np.repeat(np.arange(span.rows), span.columns)
        positions[2, span.begin : place] = next_position + np.tile(np.arange(span.columns), span.rows)
        next_position += max(span.rows, span.columns)
    positions[:, place:] = next_position + np.arange(num_tokens - place)
    return positions


def _first_tokens(
    token_ids: Int[np.ndarray, " tokens"], images: Sequence[ImageReference], image_token_id: int
) -> Iterator[int]:
    """Yield the index of the first token of each image of a sequence.

    Raises:
        ImagesDiffer: The sequence has not as many placeholders as its images need.
    """
    places = np.flatnonzero(token_ids == image_token_id)
    num_needed = sum(image.num_tokens for image in images)
    if len(places) != num_needed:
        raise ImagesDiffer(
            f"a sequence has {len(places)} image tokens, and its {len(images)} images have {num_needed}: the "
            "placeholders were expanded twice, or sampled"
        )
    index = 0
    for image in images:
        first = int(places[index])
        yield first
        index += image.num_tokens


def hidden_states(
    model: PreTrainedModel,
    token_ids: Int64[Tensor, " rows"],
    packing: Packing,
    images: ImageInputs | None,
) -> Float[Tensor, "rows hidden"]:
    """Return the hidden states of the rows of a packing.

    The vision tower also runs if there are no images, and its result is then multiplied by 0. Gathering a sharded tower
    is a collective, so every rank must run it and compute a gradient for it.

    Args:
        model: A model of one of the families.
        token_ids: The token of each row.
        packing: The layout of the packed row.
        images: The images; None if there are none.
    """
    body: Any = model.base_model
    embeddings = model.get_input_embeddings()(token_ids)
    arguments: dict[str, Any] = {}
    if images is None:
        for level in _image_features(body, *_smallest_image(model)):
            embeddings = embeddings + 0 * level.sum().to(embeddings.dtype)
        position_ids = packing.position_ids.expand(3, -1)
    else:
        features_of_rows = images.features[packing.tokens]
        is_image = features_of_rows != NO_FEATURE
        indices = features_of_rows[is_image]
        features, *further_features = [
            level.index_select(0, indices)
            for level in _image_features(body, images.pixel_values, images.grids)
        ]
        places = is_image.nonzero().flatten()
        embeddings = embeddings.index_copy(0, places, features.to(embeddings.dtype))
        position_ids = images.position_ids[:, packing.tokens]
        if further_features:
            arguments = {"visual_pos_masks": is_image[None], "deepstack_visual_embeds": further_features}
    output = body.language_model(
        inputs_embeds=embeddings[None],
        position_ids=position_ids[:, None],
        use_cache=False,
        packing=packing,
        **arguments,
    )
    return output.last_hidden_state[0]


def _image_features(body: Any, pixel_values: Tensor, grids: Tensor) -> list[Float[Tensor, "features hidden"]]:
    """Return the features of all images, one image after the other, in one or more tensors.

    The first tensor replaces the embeddings of placeholders. Qwen3-VL has further tensors, which its first layers add
    to the hidden states (Meng et al. 2024, "DeepStack").
    """
    output = body.get_image_features(pixel_values, grids, return_dict=True)
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    return [torch.cat(list(level)) for level in levels]


def _smallest_image(model: PreTrainedModel) -> tuple[Float[Tensor, "patches values"], Int64[Tensor, "1 3"]]:
    """Return the pixel values (all zero) and the grid of an image that has one token."""
    vision = model.config.vision_config
    num_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side = vision.spatial_merge_size
    device = model.get_input_embeddings().weight.device
    grid = torch.tensor([[1, side, side]], device=device)
    return torch.zeros(side**2, num_values, device=device), grid
