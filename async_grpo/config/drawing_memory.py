"""The memory of trainer ranks and engines of a policy that draws."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.config.run import RunConfig

if TYPE_CHECKING:
    from async_grpo.modeling.flow.folder import FlowFolder

FLOAT32_BYTES = 4


def drawing_parameters(folder: str | Path) -> int:
    """Return the number of parameters of a flow-matching model, read from the headers of its files.

    Args:
        folder: The folder of diffusers.
    """
    from async_grpo.modeling.flow.folder import TRANSFORMER
    from async_grpo.modeling.model_files import weight_shapes

    return sum(math.prod(shape) for shape in weight_shapes(Path(folder).expanduser() / TRANSFORMER).values())


def drawing_rank_bytes(config: RunConfig, num_ranks: int) -> float:
    """Return the estimated memory of a trainer rank in bytes: its shard of the state, and the activations."""
    from async_grpo.modeling.flow.folder import read_flow_folder

    folder = read_flow_folder(config.model_name_or_path)
    num_copies = 2 if config.kl_coef else 1  # the policy, and the reference of the KL penalty
    # Weights, gradients and both moments, and the weights of the reference
    state_bytes = FLOAT32_BYTES * drawing_parameters(folder.path) * (3 + num_copies) / num_ranks
    num_blocks = int(folder.model_config["num_layers"])
    return state_bytes + config.max_tokens_per_gpu * num_blocks * _block_bytes(folder)


def drawing_engine_bytes(model_path: str, num_pictures: int) -> float:
    """Return the estimated memory of an engine in bytes: its weights, and one block's activations.

    Args:
        model_path: Folder of the model.
        num_pictures: Number of pictures that are drawn at once.
    """
    from async_grpo.modeling.flow.folder import read_flow_folder

    folder = read_flow_folder(model_path)
    return FLOAT32_BYTES * drawing_parameters(folder.path) + num_pictures * _block_bytes(folder)


def _block_bytes(folder: "FlowFolder") -> float:
    """Return the bytes of the activations of one block for one (picture, step) pair.

    They are about 34 numbers per hidden unit and patch, as for a token of a transformer (Korthikanti et al. 2022, eq. 1).
    """
    config = folder.model_config
    hidden_size = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    num_patches = (folder.latent_shape[1] // int(config["patch_size"])) ** 2
    return 34 * FLOAT32_BYTES * hidden_size * num_patches
