"""Check the files of a model's folder, which may be untrusted: no file may run code, and weights must be readable.

No code of a folder is run, and nothing is unpickled. Without these checks, transformers would ask on the terminal
whether to run code that a configuration names (`auto_map`), would load the base model that an adapter names, and would
read weights from pickles. Many models still name their own code although transformers now has a class for them. For
these models, transformers' class is used, and their code is ignored.
"""

import stat
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.incomplete_folders import (
    INDEX_FILE,
    content_instead_of_weights,
    problem_without_weights,
    refuse_adapter,
    refuse_incomplete_shards,
    refuse_lfs_pointer,
)
from async_grpo.processes.untrusted_files import plain_parts, read_json

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Files that transformers and vLLM open if they exist, in addition to the weights
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    INDEX_FILE,
    TOKENIZER_CONFIG_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "spiece.model",
    "tekken.json",
)
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 64 << 20
# Maximum accepted values of numbers in a config.json. No real model exceeds them. With a huge number, transformers
# would build layers until the memory is full
LARGEST = {
    "num_hidden_layers": 2_000,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 26,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
}
# Numbers that must not be 0. Other numbers may be, such as that of experts in a model without experts
NOT_ZERO = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
# Names of dtypes, as torch writes them
MODEL_DTYPES = ("float64", "double", "float32", "float", "bfloat16", "float16", "half")
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")  # names of dtypes in the headers of safetensors files
# Ends of the names of masks and positions, which older versions of transformers stored among the weights. They may have
# any dtype
BUFFER_NAMES = ("attn.bias", "attention.bias", "masked_bias", "inv_freq", "position_ids")
UNQUANTISED = "train the unquantised model, from which this one was made"
MOST_PARAMETERS_PER_BYTE = 8  # plausible maximum for the files of weights: at least one bit per parameter
FETCH = "fetch the whole model (hf download NAME --local-dir FOLDER)"
CONVERT = (
    "where you trust the folder, convert them: "
    "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
)


def check_model_folder(folder: Path) -> None:
    """Raise ConfigurationError if a folder needs its own code, is an adapter, or has an implausible configuration."""
    needed_names = {*NEEDED_FILES, *(file.name for file in folder.glob("*.safetensors"))}
    for entry in sorted(folder.iterdir()):
        _refuse_special(entry, is_needed=entry.name in needed_names)
        if entry.name in needed_names:
            refuse_lfs_pointer(entry)
    refuse_adapter(folder)
    for name in ("config.json", TOKENIZER_CONFIG_FILE, "generation_config.json"):
        if (folder / name).exists():
            content = _table(folder / name)
            _refuse_code(folder / name, content)
            _refuse_wrong_end_tokens(folder / name, content)
            if name == "config.json":
                _refuse_implausible(folder / name, content)
                _refuse_unknown_dtypes(folder / name, content)


def _refuse_special(entry: Path, *, is_needed: bool) -> None:
    """Raise ConfigurationError if an entry of the folder is a pipe or a device, or if a needed file is a broken link.

    A partial download may leave broken links for files that are not needed, such as README.md. They are accepted.
    """
    try:
        mode = entry.stat().st_mode
    except FileNotFoundError as error:
        if not is_needed:
            return
        raise ConfigurationError(f"{entry} is a link to a file that is not there: {FETCH}") from error
    except OSError as error:
        raise ConfigurationError(f"{entry} of the model's folder cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ConfigurationError(f"{entry} of the model's folder is neither a file nor a folder: remove it")


def _table(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file, or raise ConfigurationError if the file cannot be read or contains no object."""
    try:
        content = read_json(path, max_bytes, follow_links=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be used: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be used: it is not a valid JSON file ({error})") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} cannot be used: it does not contain a JSON object")
    return content


def _tables(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a JSON object and all objects nested in it."""
    yield content
    for value in content.values():
        if isinstance(value, dict):
            yield from _tables(value)


def _refuse_code(path: Path, content: dict[str, Any]) -> None:
    """Raise ConfigurationError if a configuration needs code from the folder or the hub, or names another model."""
    for table in _tables(content):
        if table.get("auto_map") and not _is_known(path, table):
            raise ConfigurationError(
                f"{path} names code of its own (auto_map), which is never run, and transformers "
                f"{version('transformers')} does not know {_kind_of(path, table)} by itself: "
                "take the model in a form that it knows, or, if it does not "
                "need the code, remove auto_map from the file"
            )
        for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
            kernel = table.get(key)
            if kernel is not None and "/" in str(kernel):
                raise ConfigurationError(
                    f"{path} names code of the hub ({key}: {kernel!r:.80}): remove the key"
                )
        if table.get("speculators_config"):
            raise ConfigurationError(f"{path} names another model (speculators_config): give that one")


def _kind_of(path: Path, table: dict[str, Any]) -> str:
    """Return the `model_type` or `tokenizer_class` that a configuration names, for an error message."""
    key = "tokenizer_class" if path.name == TOKENIZER_CONFIG_FILE else "model_type"
    return f"its {key} {table.get(key)!r:.80}"


def _is_known(path: Path, table: dict[str, Any]) -> bool:
    """Return whether transformers itself has a class for the model or tokenizer that a configuration names."""
    # Import this here, because it is slow, and needed only for a folder that names code
    from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if path.name != TOKENIZER_CONFIG_FILE:
        model_type = table.get("model_type")
        return isinstance(model_type, str) and model_type in CONFIG_MAPPING
    class_name = table.get("tokenizer_class")
    tokenizer_class = tokenizer_class_from_name(class_name) if isinstance(class_name, str) else None
    return isinstance(tokenizer_class, type) and issubclass(tokenizer_class, PreTrainedTokenizerBase)


def _refuse_implausible(path: Path, content: dict[str, Any]) -> None:
    """Raise ConfigurationError if a number in the configuration exceeds its maximum in LARGEST."""
    for table in _tables(content):
        for name, largest in LARGEST.items():
            value = table.get(name)
            smallest = 1 if name in NOT_ZERO else 0
            if type(value) is int and not smallest <= value <= largest:
                raise ConfigurationError(
                    f"{path} cannot be used: {name} is {value}, and at least {smallest} and at most {largest} is read: "
                    "correct the number"
                )


def _refuse_wrong_end_tokens(path: Path, content: dict[str, Any]) -> None:
    """Raise ConfigurationError if `eos_token_id` is anything but null, a whole number, or a list of such values."""
    for table in _tables(content):
        value = table.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and type(token_id) is not int:
                raise ConfigurationError(
                    f"{path}: the end token {token_id!r:.50} is no token id (eos_token_id): write the number of the "
                    "token, such as 2, or a list of numbers"
                )


def _refuse_unknown_dtypes(path: Path, content: dict[str, Any]) -> None:
    """Raise ConfigurationError if a `dtype` in the configuration is not one of MODEL_DTYPES."""
    for table in _tables(content):
        for key in ("dtype", "torch_dtype"):
            value = table.get(key)
            # An object names a dtype for each part of the model, which are checked separately
            if value is None or isinstance(value, dict):
                continue
            if value not in MODEL_DTYPES:
                raise ConfigurationError(
                    f"{path}: {key} {value!r:.50} is no dtype of torch for weights: write float32, bfloat16 or float16"
                )


def _refuse_quantised(folder: Path) -> None:
    """Raise ConfigurationError if the configuration says that the weights are quantised.

    Files of a quantised model contain integer codes under the names of the weights. They cannot be read as weights.
    """
    path = folder / "config.json"
    content = _table(path) if path.exists() else {}
    for table in _tables(content):
        for key in ("quantization_config", "compression_config"):
            settings = table.get(key)
            if settings:
                method = settings.get("quant_method") if isinstance(settings, dict) else settings
                raise ConfigurationError(
                    f"the weights of {folder} are quantised ({key} in config.json, method {method!r:.80}), and such "
                    f"weights cannot be trained: {UNQUANTISED}"
                )


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the weights in a folder's safetensors files, by name; {} if there are no such files.

    Every safetensors file counts, because torch's reader ignores the index and reads all of them.

    Raises:
        ConfigurationError: A file cannot be read, the index names a missing file, two files contain the same weight, or
            the weights are quantised.
    """
    _refuse_quantised(folder)
    shapes: dict[str, list[int]] = {}
    places: dict[str, Path] = {}
    for file in sorted({*folder.glob("*.safetensors"), *_indexed(folder)}):
        try:
            if not file.is_file():
                raise OSError("there is no such file")
            with safe_open(file, "numpy") as weights:
                for name in list(weights.keys()):
                    if name in places:
                        raise ConfigurationError(
                            f"{name} is in two files of {folder}, {places[name].name} and {file.name}: remove the one "
                            "that is not the model's"
                        )
                    places[name] = file
                    weight = weights.get_slice(name)
                    _refuse_codes(file, name, weight.get_dtype())
                    shapes[name] = weight.get_shape()
        except (OSError, SafetensorError) as error:
            content = content_instead_of_weights(file)
            raise ConfigurationError(
                f"the weights {file} cannot be read ({error}{content}): {FETCH}"
            ) from error
    return shapes


def _refuse_codes(file: Path, name: str, dtype: str) -> None:
    """Raise ConfigurationError if the dtype of a weight is not one of WEIGHT_DTYPES.

    The integer codes of quantised weights have other dtypes, for example.
    """
    if dtype not in WEIGHT_DTYPES and not name.endswith(BUFFER_NAMES):
        raise ConfigurationError(
            f"{name} in {file} is stored as {dtype}, but only {', '.join(WEIGHT_DTYPES)} are read: {UNQUANTISED}"
        )


def _indexed(folder: Path) -> list[Path]:
    """Return the files that the folder's index names; raise ConfigurationError if one lies outside the folder."""
    path = folder / INDEX_FILE
    if not path.exists():
        return []
    names = _table(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigurationError(f"{path} cannot be used: its weight_map is no object with names of files")
    try:
        return [folder.joinpath(*plain_parts(name)) for name in sorted(set(names.values()))]
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be used: {error}") from error


def refuse_pickles(folder: Path) -> None:
    """Raise ConfigurationError if a folder lacks weights, or has only pickled weights, which could run any code."""
    if weight_shapes(folder):
        refuse_incomplete_shards(folder)
        return
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigurationError(
            f"the weights of {folder} are pickles ({pickles[0]}), which are not read: {CONVERT}"
        )
    other_weights = problem_without_weights(folder)
    raise ConfigurationError(
        f"no causal language model can be loaded from {folder}: it holds no weights (*.safetensors): "
        f"{other_weights or FETCH}"
    )


def refuse_more_parameters(folder: Path, num_parameters: int) -> None:
    """Raise ConfigurationError if the configuration describes far more parameters than the files can contain.

    transformers would allocate memory for all described parameters, and fill it with random numbers.
    """
    files = {*folder.glob("*.safetensors"), *_indexed(folder)}
    num_bytes = sum(file.stat().st_size for file in files)
    if num_parameters > MOST_PARAMETERS_PER_BYTE * num_bytes:
        raise ConfigurationError(
            f"config.json of {folder} describes {num_parameters:,} parameters, but the files with weights have only "
            f"{num_bytes:,} bytes: they do not belong together"
        )
