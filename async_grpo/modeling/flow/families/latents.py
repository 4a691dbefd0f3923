"""Functions for sizes and layouts of latents that several families share."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from async_grpo.modeling.flow.prompt_inputs import Condition, PromptInputs, TextInputs
from async_grpo.options.fields import refuse

Config = Mapping[str, Any]
Velocity = Float[Tensor, "steps channels height width"]
PATCH = 2  # FLUX and Qwen-Image read a patch of this height and width of latents as one token
CLIP_TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")
T5_TOKENIZERS = ("T5Tokenizer", "T5TokenizerFast")


def text_inputs_of(prompts: PromptInputs) -> TextInputs:
    """Return the embeddings of prompts that are texts."""
    assert prompts.text is not None, "the samples contain no embeddings of their prompts"
    return prompts.text


def as_arrays(*tensors: Tensor) -> Condition:
    """Return the first row of each tensor as a float32 array."""
    return tuple(tensor[0].float().cpu().numpy() for tensor in tensors)


def latent_size(picture_size: int, scale: int, patch: int) -> int:
    """Return the height (and width) of a picture's latents, or raise ConfigurationError if the size does not fit."""
    multiple = scale * patch
    refuse(
        picture_size % multiple != 0,
        f"--picture-size {picture_size} must be a multiple of {multiple} with this model",
    )
    return picture_size // scale


def packed(x: Velocity) -> Float[Tensor, "steps tokens packed_channels"]:
    """Return latents, or their velocity, as tokens. A token has the channels of a patch of 2 x 2 latents."""
    return pixel_unshuffle(x, PATCH).flatten(2).transpose(1, 2)


def unpacked(tokens: Float[Tensor, "steps tokens packed_channels"], height: int, width: int) -> Velocity:
    """Undo `packed`. `height` and `width` are numbers of patches."""
    return pixel_shuffle(tokens.transpose(1, 2).unflatten(2, (height, width)), PATCH)


def patch_positions(height: int, width: int, like: Tensor) -> Float[Tensor, "tokens 3"]:
    """Return (0, row, column) of each patch."""
    rows = torch.arange(height, device=like.device, dtype=like.dtype)
    columns = torch.arange(width, device=like.device, dtype=like.dtype)
    grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.nn.functional.pad(grid, (1, 0))


def shift(num_tokens: int, scheduler_config: Config, max_shift: float = 1.15) -> float:
    """Return by how much the scheduler shifts the times of a picture. It depends on the number of the picture's tokens."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    return float(
        calculate_shift(
            num_tokens,
            scheduler_config.get("base_image_seq_len", 256),
            scheduler_config.get("max_image_seq_len", 4096),
            scheduler_config.get("base_shift", 0.5),
            scheduler_config.get("max_shift", max_shift),
        )
    )
