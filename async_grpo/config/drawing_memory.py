"""Estimates of the memory of trainer ranks and engines, for a policy that draws."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config.run import RunConfig

if TYPE_CHECKING:
    from async_grpo.modeling.flow.folder import FlowFolder

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
# For each number of its hidden states, a block keeps this many numbers for its backward pass, as in a transformer
# (Korthikanti et al. 2022, eq. 1)
ACTIVATIONS_PER_HIDDEN = 34
TEXT_TOKENS = 512  # longest prompt that the text encoders read


def drawing_parameters(folder: str | Path) -> int:
    """Return the number of parameters of a flow-matching model, read from the headers of its files.

    Args:
        folder: The folder of diffusers.
    """
    from async_grpo.modeling.flow.pipeline_index import TRANSFORMER

    return _num_parameters(Path(folder).expanduser() / TRANSFORMER)


def _num_parameters(folder: Path) -> int:
    """Return the number of parameters in the files of a folder; 0 if there are none."""
    from async_grpo.modeling.model_files import weight_shapes

    return sum(math.prod(shape) for shape in weight_shapes(folder).values())


def drawing_rank_bytes(config: RunConfig, num_ranks: int) -> float:
    """Return the estimated memory of a trainer rank in bytes: its shard of the state, and the activations."""
    from async_grpo.modeling.flow.folder import read_flow_folder

    folder = read_flow_folder(config.model_name_or_path).with_options(config.picture_size, config.guidance)
    num_parameters = drawing_parameters(folder.path)
    if config.has_lora:
        # With LoRA the weights are frozen, and are the reference as well. The adapter takes little memory in comparison
        state_bytes = bytes_of_dtype(config.dtype) * num_parameters / num_ranks
    else:
        # The policy, and the reference of the KL penalty or the old policy of DiffusionNFT
        num_copies = 2 if config.kl_coef or config.trains_by_nft else 1
        # Weights, gradients and both moments, and the weights of the other policy
        state_bytes = FLOAT32_BYTES * num_parameters * (3 + num_copies) / num_ranks
    num_blocks = folder.family.num_blocks(folder.model_config)
    num_pairs = config.max_tokens_per_gpu * (2 if folder.family.needs_negative(config.guidance) else 1)
    if config.trains_by_nft:
        # Of each sequence, one token is the prompt, and the other one is a picture that is noised several times
        num_pairs = config.nft_times * config.max_tokens_per_gpu // 2
    number_bytes = bytes_of_dtype(config.dtype)
    hidden_bytes = number_bytes * _hidden_numbers(folder)
    block_bytes = ACTIVATIONS_PER_HIDDEN * hidden_bytes
    if config.gradient_checkpointing:
        # The inputs of all blocks are kept, and the activations of the one block that is being recomputed
        return state_bytes + num_pairs * (num_blocks * hidden_bytes + block_bytes)
    return state_bytes + num_pairs * num_blocks * block_bytes


def drawing_engine_bytes(
    model_path: str, num_pictures: int, *, picture_size: int, guidance: float, dtype: str
) -> float:
    """Return the estimated memory of an engine in bytes: its weights, text encoders, VAE, and one block's activations.

    Args:
        model_path: Folder of the model.
        num_pictures: Number of pictures that are drawn at once.
        picture_size: Height and width of a picture in pixels; 0 means the model's own.
        guidance: Guidance of the run.
        dtype: Dtype of the computation.
    """
    import torch

    from async_grpo.modeling.flow.folder import read_flow_folder

    folder = read_flow_folder(model_path).with_options(picture_size, guidance)
    number_bytes = bytes_of_dtype(dtype)
    weight_bytes = number_bytes * drawing_parameters(folder.path)
    # The engine loads text encoders in bfloat16 on a GPU
    encoder_bytes = BFLOAT16_BYTES if torch.cuda.is_available() else FLOAT32_BYTES
    for part in folder.part_classes:
        weight_bytes += encoder_bytes * _num_parameters(folder.path / part)
    num_pairs = num_pictures * (2 if folder.family.needs_negative(guidance) else 1)
    return weight_bytes + num_pairs * ACTIVATIONS_PER_HIDDEN * number_bytes * _hidden_numbers(folder)


def bytes_of_dtype(dtype: str) -> int:
    """Return the number of bytes of one number in the dtype of the computation."""
    return BFLOAT16_BYTES if dtype == "bfloat16" else FLOAT32_BYTES


def _hidden_numbers(folder: "FlowFolder") -> int:
    """Return how many numbers the hidden states between two blocks have for one step of one picture."""
    config = folder.model_config
    hidden_size = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    num_tokens = folder.num_tokens + (TEXT_TOKENS if folder.family.reads_text else 0)
    return hidden_size * num_tokens
