"""Export of models that draw, as folders of diffusers."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from async_grpo.modeling.flow.folder import (
    INDEX_FILE,
    SCHEDULER,
    SCHEDULER_FILE,
    TRANSFORMER,
    read_flow_folder,
)
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.export import ModelExporter, complete_folder

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


class FlowExporter(ModelExporter):
    """Writes the folder of the initial model with the trained weights. diffusers can load it."""

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
        source: A folder of the same model, whose configurations are copied.
        target: The folder to write.
    """
    with complete_folder(target) as partial:
        for name in (INDEX_FILE, f"{TRANSFORMER}/config.json", f"{SCHEDULER}/{SCHEDULER_FILE}"):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, partial / name)
        weights = partial / TRANSFORMER / WEIGHTS_FILE
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, weights)
        # safetensors creates files that only their owner can read: give them the permissions of config.json
        shutil.copymode(partial / INDEX_FILE, weights)
