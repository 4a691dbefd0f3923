"""Memory estimates, and a picture to try rewards with, for a run whose policy draws."""

import base64
from collections.abc import Iterator

from async_grpo.config.drawing_memory import FLOAT32_BYTES, drawing_engine_bytes, drawing_rank_bytes
from async_grpo.inference.config import MAX_PICTURES
from async_grpo.launch.local_config import LocalConfig


def drawing_roles(config: LocalConfig, num_parameters: int) -> Iterator[tuple[str, int, int, float]]:
    """Yield the estimated memory of all processes of a policy that draws.

    See `plan.roles`, which does so for language models.
    """
    if config.nproc_per_node:
        yield "trainer rank", config.nproc_per_node, 1, drawing_rank_bytes(config, config.nproc_per_node)
    engine_bytes = drawing_engine_bytes(
        config.model_name_or_path,
        config.max_num_seqs or MAX_PICTURES,
        picture_size=config.picture_size,
        guidance=config.guidance,
        dtype=config.dtype,
    )
    yield "engine", config.generation_workers, 1, engine_bytes
    if config.nproc_per_node:
        # Two copies of the weights, and a checkpoint that is being written (weights and both moments), in float32
        yield "rank 0's machine", 1, 0, (2 + 3) * FLOAT32_BYTES * num_parameters


def gray_picture(config: LocalConfig) -> str:
    """Return a gray picture of the size that the model draws, as a PNG file in base64. Rewards are tried with it."""
    import numpy as np

    from async_grpo.inference.drawing.pictures import png_of
    from async_grpo.modeling.flow.folder import read_flow_folder

    # Values of pictures lie between -1 and 1, so 0 is gray
    folder = read_flow_folder(config.model_name_or_path).with_options(config.picture_size, config.guidance)
    return base64.b64encode(png_of(np.zeros(folder.picture_shape, np.float32))).decode()
