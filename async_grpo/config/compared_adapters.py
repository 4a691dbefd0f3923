"""`ComparedAdapters`: several LoRA adapters of one base, converted so that one engine can apply each of them.

An engine applies adapters of one rank and one scale to fixed layers. So all adapters are converted to a common form: the
largest of their ranks, the scale 1, and all layers for which any of them has an adapter. They compute the same as before:
rows of A and columns of B that are zero add nothing, and s B A is (s B) A.

The base model is compared as well. Its adapter is zero.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from async_grpo.config.lora import refuse_other_model, settings_of_folder
from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import LORA_RANKS
from async_grpo.messages import LoraSettings
from async_grpo.modeling.auto_classes import reads_images
from async_grpo.modeling.incomplete_folders import ADAPTER_CONFIG_FILE
from async_grpo.modeling.load import empty_causal_lm, load_config
from async_grpo.modeling.lora import FILE_PREFIX, read_lora_tensors
from async_grpo.options.fields import refuse
from async_grpo.options.listed_values import split_table

BASE = "base"  # name under which the results of the base model are shown
NAME_MARKS = "-_."  # characters that a name may have beside letters and digits; it becomes part of file names


def adapter_folders(adapters: str) -> dict[str, Path]:
    """Return the folders that `--lora-adapters` names, by the names of the adapters, in the order of the option.

    Raises:
        ConfigurationError: A name is missing, given twice or unusable, or a folder contains no adapter.
    """
    if "=" in adapters or adapters.startswith("{"):
        pairs = [
            (name, Path(str(path)).expanduser()) for name, path in split_table(adapters, "lora-adapters")
        ]
    else:
        folder = Path(adapters).expanduser()
        paths = [folder] if _holds_adapter(folder) else sorted(folder.glob("*"), key=_natural_order)
        pairs = [(path.name, path) for path in paths if _holds_adapter(path)]
        refuse(not pairs, f"--lora-adapters {folder}: neither this folder nor one inside it holds an adapter")
    folders = dict(pairs)
    refuse(len(folders) < len(pairs), f"--lora-adapters {adapters}: two adapters have the same name")
    for name, folder in folders.items():
        is_usable = name and all(character.isalnum() or character in NAME_MARKS for character in name)
        refuse(
            not is_usable or name == BASE,
            f"--lora-adapters: {name!r} is no name for an adapter: use letters, digits and {' '.join(NAME_MARKS)}; "
            f"{BASE!r} is the name of the base model",
        )
        refuse(
            not _holds_adapter(folder),
            f"--lora-adapters {name}={folder}: there is no {ADAPTER_CONFIG_FILE}, so this is no adapter in peft's format",
        )
    return folders


def _holds_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def _natural_order(path: Path) -> tuple[list[str], list[int], str]:
    """Return a sort key by which "samples_960" comes before "samples_1920", and "b_1" after "a_2".

    The words of the names are compared first, then their numbers from left to right, then the names.
    """
    words = re.split("[0-9]+", path.name)
    numbers = [int(digits) for digits in re.findall("[0-9]+", path.name)]
    return words, numbers, path.name


@dataclass(frozen=True)
class ComparedAdapters:
    """Adapters of one base, whose tensors are read when they are needed."""

    own_settings: Mapping[str, LoraSettings]  # name of an adapter -> its own settings, with its folder
    settings: LoraSettings  # settings of the common form, to which all adapters are converted
    # Name of a tensor in peft's files -> shape: (rank, in) of A, (out, rank) of B
    shapes: Mapping[str, tuple[int, int]]

    @classmethod
    def read(cls, folders: Mapping[str, Path], model_path: str) -> "ComparedAdapters":
        """Read and check the adapters in the folders.

        Raises:
            ConfigurationError: An adapter does not fit the base, or cannot be read, or no engine could apply it.
        """
        refuse(
            reads_images(load_config(model_path)),
            f"--lora-adapters: adapters are not supported for models that read images, such as {model_path}: evaluate "
            "merged models (async-grpo export ADAPTER --merged)",
        )
        model = empty_causal_lm(model_path)
        own_settings = {}
        for name, folder in folders.items():
            own_settings[name] = settings_of_folder(folder.absolute(), model_path, sync="adapter")
            # This also reads the tensors. So a damaged adapter is refused now, and not after other adapters were
            # evaluated
            refuse_other_model(model, own_settings[name])
        rank = max(settings.rank for settings in own_settings.values())
        if rank > LORA_RANKS[-1]:
            raise ConfigurationError(
                f"--lora-adapters: engines apply adapters of at most rank {LORA_RANKS[-1]}, and one has {rank}: evaluate a "
                "merged model instead (async-grpo export ADAPTER --merged)"
            )
        layers: set[str] = set()
        for settings in own_settings.values():
            layers.update(settings.layers)
        shapes = {}
        for layer in sorted(layers):
            out_features, in_features = model.get_submodule(layer).weight.shape
            shapes[f"{FILE_PREFIX}{layer}.lora_A.weight"] = (rank, in_features)
            shapes[f"{FILE_PREFIX}{layer}.lora_B.weight"] = (out_features, rank)
        return cls(own_settings, LoraSettings(rank, 1.0, tuple(sorted(layers)), "adapter"), shapes)

    @property
    def names(self) -> list[str]:
        """Return the names under which results are shown: first that of the base, then the adapters' names."""
        return [BASE, *self.own_settings]

    def folder_of(self, name: str) -> str:
        """Return the folder of an adapter; "" for the base."""
        return "" if name == BASE else self.own_settings[name].initial_folder

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return an adapter's tensors in the common form (see the module's docstring), in float32, by peft's names.

        Args:
            name: Name of an adapter, or BASE, for which all tensors are zero.

        Raises:
            ConfigurationError: The adapter's file has changed since `read`, and does not fit any more.
        """
        tensors = {tensor_name: torch.zeros(shape) for tensor_name, shape in self.shapes.items()}
        if name == BASE:
            return tensors
        settings = self.own_settings[name]
        own_shapes = {}
        for layer in settings.layers:
            name_of_a = f"{FILE_PREFIX}{layer}.lora_A.weight"
            name_of_b = f"{FILE_PREFIX}{layer}.lora_B.weight"
            own_shapes[name_of_a] = (settings.rank, self.shapes[name_of_a][1])
            own_shapes[name_of_b] = (self.shapes[name_of_b][0], settings.rank)
        for tensor_name, matrix in read_lora_tensors(Path(settings.initial_folder), own_shapes).items():
            factor = settings.scaling if ".lora_B." in tensor_name else 1.0
            num_rows, num_columns = matrix.shape
            tensors[tensor_name][:num_rows, :num_columns] = factor * matrix.float()
        return tensors
