"""Export of models that draw, as folders of diffusers."""

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from async_grpo.modeling.flow.folder import SCHEDULER_FILE, read_flow_folder
from async_grpo.modeling.flow.pipeline_index import INDEX_FILE, SCHEDULER, TRANSFORMER
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.export import ModelExporter, complete_folder

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


class FlowExporter(ModelExporter):
    """Writes the folder of the initial model with the trained weights. diffusers can load it.

    A LoRA adapter is added to the weights, so that every export is a whole model.
    """

    def __post_init__(self) -> None:
        self.lora = None
        super().__post_init__()

    def _source_folder(self) -> Path:
        return read_flow_folder(self.model_path).path

    def _write(
        self,
        policy: PolicyModel,
        state: dict[str, Tensor],
        value_head: dict[str, Tensor],
        target: Path,
        dtype: torch.dtype,
    ) -> None:
        write_flow_folder(state, self._source, target)


def write_flow_folder(state: dict[str, Tensor], source: Path, target: Path) -> None:
    """Write a folder of diffusers, so that the folder `target` is always complete.

    Args:
        state: The weights of the transformer, by name.
        source: A folder of the same model, whose configurations and further parts (text encoders, VAE) are taken over.
        target: The folder to write.
    """
    with complete_folder(target) as partial:
        for name in (INDEX_FILE, f"{TRANSFORMER}/config.json", f"{SCHEDULER}/{SCHEDULER_FILE}"):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, partial / name)
        for part in read_flow_folder(source).part_classes:
            shutil.copytree(source / part, partial / part, copy_function=_link_or_copy)
        weights = partial / TRANSFORMER / WEIGHTS_FILE
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
        # safetensors creates files that only their owner can read: give them the permissions of config.json
        shutil.copymode(partial / INDEX_FILE, weights)


def _link_or_copy(source: str, target: str) -> None:
    """Make a file without copying its bytes if the file system can. Text encoders may have 20 GB, and never change."""
    # A model that was downloaded to a cache consists of links. A link to a link would break when the cache is emptied
    file = os.path.realpath(source)
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
