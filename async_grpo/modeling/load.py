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
from async_grpo.modeling.model_files import check_model_folder, refuse_more_parameters, refuse_pickles
from async_grpo.processes.untrusted_files import read_json

disable_progress_bar()  # in logs and on the console they stand between the lines of the run
# What decides whether weights of one folder make sense in a model built from another, not how it was written
ARCHITECTURE_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "sliding_window", "layer_types", "attention_bias", "mlp_bias"),
    "tie_word_embeddings",
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
MAX_TOKENIZER_BYTES = 256 << 20
# Said everywhere: where nothing is said, transformers asks on the terminal whether to run a folder's code
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
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
    check_model_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    except Exception as error:  # transformers raises nothing narrower for files that hold anything
        raise ConfigurationError(f"the configuration in {folder} cannot be used: {error}") from error
    if hasattr(
        config, "auto_map"
    ):  # a model that the run writes does not hold the code, and does not need it
        del config.auto_map
    return config


def load_tokenizer(path: str | Path) -> Any:
    """The folder's tokenizer; ConfigurationError if it cannot be read."""
    check_model_folder(model_folder(path))
    try:
        return AutoTokenizer.from_pretrained(model_folder(path), **LOCAL)
    except Exception as error:  # the library raises nothing narrower for a file that is cut short
        said = f"the tokenizer in {path} cannot be read ({error}): copy the tokenizer's files again"
        raise ConfigurationError(said) from error


def load_causal_lm(path: str | Path, dtype: str | torch.dtype) -> PreTrainedModel:
    """Return the folder's causal LM on the CPU, every weight in `dtype`.

    Raises:
        ConfigurationError: the folder has none, or not all of its weights.
    """
    folder, config = model_folder(path), load_config(path)
    refuse_pickles(folder)
    empty_causal_lm(path)  # refuses a configuration that asks for more memory than the weights have
    options: dict[str, Any] = {
        "dtype": torch_dtype(dtype),
        "use_safetensors": True,
        "output_loading_info": True,
    }
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(folder, config=config, **LOCAL, **options)
    except Exception as error:  # transformers raises nothing narrower for files that hold anything
        raise ConfigurationError(f"no causal language model can be loaded from {path}: {error}") from error
    if missing := sorted(loaded["missing_keys"]):
        raise ConfigurationError(
            f"the weights in {path} lack {len(missing)} of the model's, such as {missing[0]}, which would be made up: "
            "fetch the whole model (hf download NAME --local-dir FOLDER)"
        )
    return model


def empty_causal_lm(path: str | Path) -> PreTrainedModel:
    """Return the folder's causal LM in float32 without its weights.

    They take no memory ("meta") until they are assigned. ConfigurationError: the configuration is of no causal LM, or of a
    larger one than the folder's weights.
    """
    config = load_config(path)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # transformers raises nothing narrower for files that hold anything
        raise ConfigurationError(f"no causal language model can be made of {path}: {error}") from error
    model.tie_weights()  # each place has got a parameter of its own
    refuse_more_parameters(model_folder(path), sum(weight.numel() for weight in model.parameters()))
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
        try:
            tokenizer = read_json(folder / "tokenizer.json", MAX_TOKENIZER_BYTES, follow_links=True)
            added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
            return {"vocab": tokenizer.get("model", {}).get("vocab"), "added": added}
        except Exception as error:  # transformers raises nothing narrower for files that hold anything
            raise ConfigurationError(f"the tokenizer in {folder} cannot be read ({error})") from error
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
        settings = read_json(folder / "generation_config.json", follow_links=True)
        named.append(settings.get("eos_token_id"))
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        named.append(load_tokenizer(folder).eos_token_id)
    ids: set[int] = set()
    for value in named:
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int:
                raise ConfigurationError(
                    f"{folder}: the end token {token_id!r:.50} is no token id (eos_token_id)"
                )
            ids.add(token_id)
    if not ids:
        raise ConfigurationError(f"{folder} has no end token; add eos_token_id to generation_config.json")
    return tuple(sorted(ids))


def context_length(path: str | Path) -> int:
    """The most tokens of prompt and completion together that the model's positions reach."""
    length = getattr(load_config(path).get_text_config(), "max_position_embeddings", None)
    if type(length) is not int:
        raise ConfigurationError(f"{path}/config.json does not say max_position_embeddings; add it")
    return int(length)
