"""Models in the Hugging Face format: `<output_dir>/hf_format/samples_<n>`, whole or not there."""

import copy
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import TOKENIZER_FILES, model_folder, torch_dtype
from async_grpo.modeling.policy import PolicyModel, named_full_tensors, value_head_tensors
from async_grpo.training.distributed import Ranks

log = logging.getLogger(__name__)
# Copied as they are: a checkpoint speaks the tokens, byte for byte, that the run was trained on
COPIED_FILES = (
    *(*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "generation_config.json"),
)
# In a folder of its own: vLLM loads every *.safetensors beside the config.json as the model's
VALUE_HEAD_FILE = "critic/value_head.safetensors"


@dataclass
class ModelExporter:
    """Writes and prunes models that any library loads; saving is a collective, the files are rank 0's."""

    output_dir: Path
    model_path: str | Path  # the folder the run started from, with its tokenizer and generation settings
    ranks: Ranks
    dtype: str = "bfloat16"  # of the saved weights
    min_samples_between: int = 30_000  # one is due that many samples after the last
    keep_last: int | None = None  # None keeps all
    resumed_at: int = 0  # the samples that a resumed run has been trained on

    def __post_init__(self) -> None:
        self._folder = self.output_dir / "hf_format"
        self._source, self._dtype = model_folder(self.model_path), torch_dtype(self.dtype)
        older = [path for path in self._folder.glob("samples_*") if 0 < _samples(path) <= self.resumed_at]
        self._written = sorted(older, key=_samples)  # by this run, the oldest first
        newest = _samples(self._written[-1]) if self.ranks.is_main and older else 0
        self._last_saved = int(self.ranks.max([float(newest)])[0])  # other nodes may not see the folder

    def is_due(self, samples: int) -> bool:
        """Whether `samples` trained on is far enough beyond the last checkpoint."""
        return samples - self._last_saved >= self.min_samples_between

    def save_if_due(self, policy: PolicyModel, samples: int) -> None:
        """A checkpoint of `policy`, if one is due; a collective then. One that cannot be written ends no run."""
        if not self.is_due(samples):
            return
        before, failed = self._last_saved, False
        try:
            self.save(policy, samples)
        except (OSError, SafetensorError) as error:
            log.error("the model could not be written; the run goes on: %s", error)
            failed = True
        if self.ranks.max([float(failed)])[0]:
            self._last_saved = before

    def save_final(self, policy: PolicyModel, samples: int) -> None:
        """Save unless the last checkpoint already holds these weights."""
        if samples != self._last_saved:  # not "if the folder exists": ranks on other nodes may not see it
            self.save(policy, samples)

    def save(self, policy: PolicyModel, samples: int) -> Path:
        """Write the weights after `samples` samples. A collective; rank 0 returns when it is complete."""
        target = self._folder / f"samples_{samples}"
        state: dict[str, Tensor] = {}
        for name, tensor in named_full_tensors(policy, self._dtype):  # every rank takes part, one keeps
            if self.ranks.is_main:
                state[name] = tensor.to("cpu", self._dtype, copy=True)
        value_head, self._last_saved = value_head_tensors(policy), samples
        if self.ranks.is_main:
            write_model(policy.model, state, value_head, target, source=self._source, dtype=self._dtype)
            self._written.append(target)  # other runs' checkpoints are not ours to prune
            while self.keep_last and len(self._written) > self.keep_last:
                shutil.rmtree(self._written.pop(0))
        return target


def write_model(
    model: PreTrainedModel,
    state: dict[str, Tensor],
    value_head: dict[str, Tensor],
    target: Path,
    *,
    source: Path,
    dtype: torch.dtype,
) -> None:
    """Write `state`, of `model`'s architecture, with the tokenizer of `source`: a whole folder, or none.

    Under a hidden name first: a folder of the target's name is a whole one, come what may.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name.rpartition('_')[0]}*.partial"):
        shutil.rmtree(leftover)
    partial, replaced = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "replaced"))
    shutil.rmtree(replaced, ignore_errors=True)
    # The same architecture without memory: save_pretrained reads class, dtype and tied names off it. Its
    # generation settings are defaults (transformers refuses to save some); the source's are copied
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    twin.save_pretrained(partial, state_dict=state)
    for name in COPIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    if value_head:
        (partial / VALUE_HEAD_FILE).parent.mkdir()
        tensors = {name: tensor.to("cpu", torch.float32) for name, tensor in value_head.items()}
        save_file(tensors, partial / VALUE_HEAD_FILE)
    for path in partial.rglob("*.safetensors"):  # they are made for their owner's eyes alone
        shutil.copymode(partial / "config.json", path)
    if target.exists():  # from an earlier run into the same output_dir
        os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced, ignore_errors=True)


def _samples(path: Path) -> int:
    number = path.name.removeprefix("samples_")
    return int(number) if number.isdigit() else 0  # of somebody else


def load_value_head(policy: PolicyModel, folder: str | Path) -> bool:
    """Load the value head in `folder` into a policy not yet sharded; False: either has none. A broken one is refused."""
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
