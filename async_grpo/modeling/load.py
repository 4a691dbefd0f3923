"""A model folder in the Hugging Face format: its weights, and what the library must know of it; no network."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from async_grpo.errors import ConfigurationError

disable_progress_bar()  # in logs and on the console they stand between the lines of the run
# What decides whether weights of one folder make sense in a model built from another, not how it was written
ARCHITECTURE_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "sliding_window", "layer_types", "attention_bias", "mlp_bias"),
    "tie_word_embeddings",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def model_folder(path: str | Path) -> Path:
    """`path` as a folder that holds a config.json; ConfigurationError otherwise."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigurationError(
            f"the model path {str(path)!r} {missing}; give a local folder in the Hugging Face format "
            "(`hf download NAME --local-dir FOLDER` fetches one)"
        )
    return folder


def load_config(path: str | Path) -> PreTrainedConfig:
    """The folder's configuration; ConfigurationError if it is missing or cannot be read."""
    folder = model_folder(path)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"the configuration in {folder} cannot be used: {error}") from error


def load_tokenizer(path: str | Path) -> Any:
    """The folder's tokenizer; ConfigurationError if it cannot be read."""
    try:
        return AutoTokenizer.from_pretrained(model_folder(path), local_files_only=True)
    except Exception as error:  # the library raises nothing narrower for a file that is cut short
        said = f"the tokenizer in {path} cannot be read ({error}): copy the tokenizer's files again"
        raise ConfigurationError(said) from error


def load_causal_lm(path: str | Path, dtype: str | torch.dtype) -> PreTrainedModel:
    """The folder's causal LM on the CPU, every weight in `dtype`; ConfigurationError if it has none."""
    config, options = load_config(path), {"dtype": torch_dtype(dtype), "local_files_only": True}
    try:
        return AutoModelForCausalLM.from_pretrained(model_folder(path), config=config, **options)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"no causal language model can be loaded from {path}: {error}") from error


def empty_causal_lm(path: str | Path) -> PreTrainedModel:
    """The folder's causal LM in float32 without its weights, which take no memory ("meta") until they are assigned."""
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(load_config(path), dtype=torch.float32)
    model.tie_weights()  # each place has got a parameter of its own
    return model


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The dtype of that name; ConfigurationError: none of DTYPES."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigurationError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def model_fingerprint(path: str | Path) -> str:
    """sha256 (hex) over the architecture and the vocabulary: equal for a model and its checkpoints."""
    text_config = load_config(path).get_text_config()
    architecture = {name: getattr(text_config, name, None) for name in ARCHITECTURE_FIELDS}
    described = {"architecture": architecture, "vocabulary": _vocabulary(model_folder(path))}
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()


def _vocabulary(folder: Path) -> Any:
    """The tokens and their ids; what else tokenizer.json says changes with the library that wrote it."""
    if (folder / "tokenizer.json").is_file():
        tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
        return {"vocab": tokenizer.get("model", {}).get("vocab"), "added": added}
    for name in ("tokenizer.model", "vocab.json"):
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return None


def stop_token_ids(path: str | Path) -> tuple[int, ...]:
    """Every id that ends a sequence, ascending; ConfigurationError if no place names one.

    Chat models name several in different places; a finished answer whose end id is not known looks truncated.
    """
    folder = model_folder(path)
    named: list[int | list[int] | None] = [load_config(folder).get_text_config().eos_token_id]
    if (folder / "generation_config.json").is_file():
        named.append(json.loads((folder / "generation_config.json").read_text()).get("eos_token_id"))
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        named.append(load_tokenizer(folder).eos_token_id)
    ids = {i for value in named if value is not None for i in ([value] if isinstance(value, int) else value)}
    if not ids:
        raise ConfigurationError(f"{folder} has no end token; add eos_token_id to generation_config.json")
    return tuple(sorted(ids))


def context_length(path: str | Path) -> int:
    """The most tokens of prompt and completion together that the model's positions reach."""
    length = getattr(load_config(path).get_text_config(), "max_position_embeddings", None)
    if length is None:
        raise ConfigurationError(f"{path}/config.json does not say max_position_embeddings; add it")
    return int(length)
