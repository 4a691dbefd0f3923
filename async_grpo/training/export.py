"""Export models in the Hugging Face format to `<output_dir>/hf_format/samples_<n>`, each folder atomically."""

import copy
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from async_grpo.errors import ConfigurationError
from async_grpo.messages import LoraSettings
from async_grpo.modeling import full_tensor
from async_grpo.modeling.auto_classes import auto_class
from async_grpo.modeling.load import TOKENIZER_FILES, model_folder, torch_dtype
from async_grpo.modeling.lora import named_lora_tensors, write_lora_folder
from async_grpo.modeling.policy import PolicyModel, named_full_tensors, value_head_tensors
from async_grpo.training.distributed import Ranks

log = logging.getLogger(__name__)
# Files that are copied unchanged, so that an exported model has the same tokenizer and image processor as the training
COPIED_FILES = (
    *TOKENIZER_FILES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# The value head is in a subfolder, because vLLM loads every *.safetensors next to config.json as weights of the model
VALUE_HEAD_FILE = "critic/value_head.safetensors"


@dataclass
class ModelExporter:
    """Writes models that other libraries can load, and removes old exports. Saving is a collective; rank 0 writes.

    With LoRA, an export is the folder of an adapter in peft's format. `async-grpo export --merged` makes a model of it.
    """

    output_dir: Path  # folder of the run
    model_path: str | Path  # folder of the run's initial model, with its tokenizer and generation settings
    ranks: Ranks
    dtype: str = "bfloat16"  # dtype of the exported weights
    min_samples_between: int = 30_000  # number of trained samples between two exports
    keep_last: int | None = None  # number of newest exports that are kept; None keeps all
    resumed_at: int = 0  # number of samples that were trained before the run was resumed; 0 for a new run
    # Settings of the adapter that is trained; None if all weights are trained
    lora: LoraSettings | None = None
    folder_name: str = "hf_format"  # name of the folder of all exports, in the folder of the run
    # Called on every rank after each export, with the number of samples that were trained before it. The function may
    # save data that belongs to the export, such as a critic
    also_save: Callable[[int], Any] = lambda samples: None
    # Within this context, the policy has the weights to export, if these are not the trained ones
    in_place: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self._folder = self.output_dir / self.folder_name
        self._source = self._source_folder()
        self._dtype = torch_dtype(self.dtype)
        older = [path for path in self._folder.glob("samples_*") if 0 < _samples(path) <= self.resumed_at]
        self._written = sorted(older, key=_samples)  # exports of this run, the oldest first
        last_saved = _samples(self._written[-1]) if self.ranks.is_main and older else 0
        # Only rank 0 looks for earlier exports, because ranks on other nodes may not see the folder
        self._last_saved = int(self.ranks.max([float(last_saved)])[0])

    def _source_folder(self) -> Path:
        """Return the folder of the run's initial model."""
        return model_folder(self.model_path)

    def is_due(self, samples: int) -> bool:
        """Return whether an export is due after a number of trained samples."""
        return samples - self._last_saved >= self.min_samples_between

    def save_if_due(self, policy: PolicyModel, samples: int) -> None:
        """Save an export if it is due. A collective. If writing fails, the error is logged and the run continues."""
        if not self.is_due(samples):
            return
        previous = self._last_saved
        has_failed = False
        try:
            self.save(policy, samples)
        except (OSError, SafetensorError) as error:
            log.error("the model could not be written; the run goes on: %s", error)
            has_failed = True
        if self.ranks.max([float(has_failed)])[0]:
            self._last_saved = previous

    def save_final(self, policy: PolicyModel, samples: int) -> None:
        """Save an export, unless the last one already has these weights."""
        # Compare numbers of samples, which all ranks know. Ranks on other nodes may not see whether the folder exists, but
        # all ranks must decide alike
        if samples != self._last_saved:
            self.save(policy, samples)

    def save(self, policy: PolicyModel, samples: int) -> Path:
        """Export the current weights to the folder `samples_<samples>`. A collective.

        On rank 0 the export is complete when this method returns.
        """
        target = self._folder / f"samples_{samples}"
        # Adapters are small, and merging one in float32 is more exact
        dtype = self._dtype if self.lora is None else torch.float32
        state: dict[str, Tensor] = {}
        with self.in_place():
            # Gathering a sharded tensor is a collective of all ranks, but only rank 0 keeps the result
            for name, tensor in self._full_tensors(policy):
                if self.ranks.is_main:
                    state[name] = tensor.to("cpu", dtype, copy=True)
        value_head = value_head_tensors(policy)
        self._last_saved = samples
        try:
            if self.ranks.is_main:
                self._write(policy, state, value_head, target, dtype)
                # `_written` lists only exports of this run, so no export of another run is removed
                self._written.append(target)
                while self.keep_last and len(self._written) > self.keep_last:
                    shutil.rmtree(self._written.pop(0))
        finally:
            # Call this even if writing failed on rank 0: it may be a collective, in which the other ranks would wait
            # for rank 0
            self.also_save(samples)
        return target

    def _full_tensors(self, policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the weights to export. A collective."""
        if self.lora is None:
            yield from named_full_tensors(policy, self._dtype)
            return
        for name, tensor in named_lora_tensors(policy.model):
            yield name, full_tensor(tensor)

    def _write(
        self,
        policy: PolicyModel,
        state: dict[str, Tensor],
        value_head: dict[str, Tensor],
        target: Path,
        dtype: torch.dtype,
    ) -> None:
        """Write the gathered tensors to the folder `target`."""
        if self.lora is None:
            write_model(policy.model, state, value_head, target, source=self._source, dtype=dtype)
        else:
            write_adapter(state, self.lora, value_head, target, source=self._source)


def write_model(
    model: PreTrainedModel,
    state: dict[str, Tensor],
    value_head: dict[str, Tensor],
    target: Path,
    *,
    source: Path,
    dtype: torch.dtype,
) -> None:
    """Write a model folder under a hidden name and rename it, so that the folder `target` is always complete.

    Args:
        model: A model with the right configuration; its weights are not used.
        state: The weights by name.
        value_head: The weights of a value head by name; {} writes no value head.
        target: The folder to write.
        source: A model folder whose tokenizer and generation settings are copied.
        dtype: The dtype of the weights.
    """
    # save_pretrained reads only the class, the dtype and the tied names of a model, so a model on the "meta" device
    # suffices. This model keeps the default generation settings, because transformers refuses to save some other
    # settings. The generation settings of `source` are copied later, as a file
    with torch.device("meta"):
        twin = auto_class(model.config).from_config(
            copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    with complete_folder(target) as partial:
        twin.save_pretrained(partial, state_dict=state)
        _add_files(partial, source, value_head)
        # safetensors creates files that only their owner can read: give them the permissions of config.json
        for path in partial.rglob("*.safetensors"):
            shutil.copymode(partial / "config.json", path)


def write_adapter(
    tensors: dict[str, Tensor],
    settings: LoraSettings,
    value_head: dict[str, Tensor],
    target: Path,
    *,
    source: Path,
) -> None:
    """Write the folder of a LoRA adapter in peft's format, so that the folder `target` is always complete.

    Args:
        tensors: The adapter's tensors by peft's names.
        settings: The adapter's settings.
        value_head: The weights of a value head by name; {} writes no value head.
        target: The folder to write.
        source: Folder of the base model, whose tokenizer and generation settings are copied, and which the adapter names.
    """
    with complete_folder(target) as partial:
        partial.mkdir()
        write_lora_folder(partial, tensors, settings, str(source.absolute()), torch.float32)
        _add_files(partial, source, value_head)


@contextmanager
def complete_folder(target: Path) -> Iterator[Path]:
    """Yield the hidden path of a folder for the block to make. After the block, the folder gets the name `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name.rpartition('_')[0]}*.partial"):
        shutil.rmtree(leftover)
    partial = target.with_name(f".{target.name}.partial")
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    yield partial
    # An earlier run with the same output_dir may have left a folder of this name
    if target.exists():
        os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced, ignore_errors=True)


def _add_files(folder: Path, source: Path, value_head: dict[str, Tensor]) -> None:
    """Copy the tokenizer and the generation settings of `source` into a folder, and write the value head, if any."""
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if value_head:
        (folder / VALUE_HEAD_FILE).parent.mkdir()
        tensors = {name: tensor.to("cpu", torch.float32) for name, tensor in value_head.items()}
        save_file(tensors, folder / VALUE_HEAD_FILE)


def _samples(path: Path) -> int:
    """Return the number n in the name samples_<n> of an export's folder, and 0 for any other folder."""
    number = path.name.removeprefix("samples_")
    # Check for ASCII, because `isdecimal` is also true for digits of other scripts. `isdigit` would be true even for
    # "²"
    return int(number) if number.isascii() and number.isdecimal() else 0


def load_value_head(policy: PolicyModel, folder: str | Path) -> bool:
    """Load the value head from a model folder into a policy that is not sharded yet.

    Returns:
        Whether a value head was loaded: both the policy and the folder must have one.

    Raises:
        ConfigurationError: The file cannot be read or does not fit the policy.
    """
    path = Path(folder) / VALUE_HEAD_FILE
    if policy.value_head is None or not path.is_file():
        return False
    try:
        policy.value_head.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read as the value head of this model: {error}; give the checkpoint of the same model, "
            "or remove the file to start a new critic"
        ) from error
    return True
