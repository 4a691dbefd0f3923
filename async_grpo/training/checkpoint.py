"""Checkpoints in the Hugging Face format: `<output_dir>/hf_format/samples_<n>`, whole or not there."""

import copy
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import model_folder, torch_dtype
from async_grpo.modeling.policy import PolicyModel, named_full_tensors, value_head_tensors
from async_grpo.training.distributed import Ranks

# Copied as they are: a checkpoint speaks the tokens, byte for byte, that the run was trained on
COPIED_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "generation_config.json"),
)
# In a folder of its own: vLLM loads every *.safetensors beside the config.json as the model's
VALUE_HEAD_FILE = "critic/value_head.safetensors"


class CheckpointWriter:
    """Writes and prunes checkpoints; saving is a collective, the files are rank 0's.

    model_path: the folder the run started from, with its tokenizer and generation settings. dtype: of the saved weights.
    min_samples_between: a checkpoint is due that many samples after the last. keep_last: None keeps all.
    """

    def __init__(
        self,
        output_dir: str | Path,
        model_path: str | Path,
        ranks: Ranks,
        *,
        dtype: str | torch.dtype = "bfloat16",
        min_samples_between: int = 30_000,
        keep_last: int | None = None,
    ) -> None:
        self._folder = Path(output_dir) / "hf_format"
        self._source, self._ranks, self._dtype = model_folder(model_path), ranks, torch_dtype(dtype)
        self._min_samples_between, self._keep_last = min_samples_between, keep_last
        self._last_saved = 0
        self._written: list[Path] = []  # by this run, the oldest first

    def is_due(self, samples: int) -> bool:
        """Whether `samples` trained on is far enough beyond the last checkpoint."""
        return samples - self._last_saved >= self._min_samples_between

    def save_if_due(self, policy: PolicyModel, samples: int) -> None:
        """A checkpoint of `policy`, if one is due; a collective then."""
        if self.is_due(samples):
            self.save(policy, samples)

    def save_final(self, policy: PolicyModel, samples: int) -> None:
        """Save unless the last checkpoint already holds these weights."""
        if samples != self._last_saved:  # not "if the folder exists": ranks on other nodes may not see it
            self.save(policy, samples)

    def save(self, policy: PolicyModel, samples: int) -> Path:
        """Write the weights after `samples` samples. A collective; rank 0 returns when it is complete."""
        target = self._folder / f"samples_{samples}"
        state: dict[str, Tensor] = {}
        for name, tensor in named_full_tensors(policy):  # every rank takes part, one keeps
            if self._ranks.is_main:
                state[name] = tensor.to("cpu", self._dtype, copy=True)
        value_head = value_head_tensors(policy)
        if self._ranks.is_main:
            self._write(policy.model, state, value_head, target)
            self._written.append(target)  # other runs' checkpoints are not ours to prune
            while self._keep_last and len(self._written) > self._keep_last:
                shutil.rmtree(self._written.pop(0))
        self._last_saved = samples
        return target

    def _write(
        self, model: PreTrainedModel, state: dict[str, Tensor], value_head: dict[str, Tensor], target: Path
    ) -> None:
        """Under a hidden name first: a folder called samples_<n> is a whole one, come what may."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".samples_*"):
            shutil.rmtree(leftover)
        partial, replaced = (self._folder / f".{target.name}.{suffix}" for suffix in ("partial", "replaced"))
        # The same architecture without memory: save_pretrained reads class, dtype and tied names off it. Its
        # generation settings are defaults (transformers refuses to save some); the source's are copied
        with torch.device("meta"):
            twin = AutoModelForCausalLM.from_config(
                copy.deepcopy(model.config), dtype=self._dtype, attn_implementation="eager"
            )
        twin.save_pretrained(partial, state_dict=state)
        for name in COPIED_FILES:
            if (self._source / name).is_file():
                shutil.copyfile(self._source / name, partial / name)
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
