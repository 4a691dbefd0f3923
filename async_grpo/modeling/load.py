"""Load a model from a folder in the Hugging Face format, without network access."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import (
    disable_progress_bar,
    get_verbosity,
    set_verbosity,
    set_verbosity_error,
)

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.auto_classes import auto_class
from async_grpo.modeling.incomplete_folders import problem_without_config
from async_grpo.modeling.model_files import (
    BUFFER_NAMES,
    TOKENIZER_CONFIG_FILE,
    check_model_folder,
    refuse_more_parameters,
    refuse_pickles,
    weight_shapes,
)
from async_grpo.processes.untrusted_files import read_json

disable_progress_bar()  # progress bars would appear between the run's own lines in logs and on the console
# Fields of a configuration. If they are equal in two folders, the weights of one folder fit a model built from the
# other
ARCHITECTURE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
)
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (*VOCABULARY_FILES, TOKENIZER_CONFIG_FILE)
MAX_TOKENIZER_BYTES = 256 << 20
# Arguments of every call of transformers. Without trust_remote_code=False, transformers asks on the terminal whether to
# run the code of a folder
LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
FEWEST_POSITIONS = 2  # minimum context: one token of a prompt, and one of a completion
DTYPES = ("float32", "bfloat16", "float16", "float64")


def model_folder(path: str | Path) -> Path:
    """Return the folder as a Path, or raise ConfigurationError if it has no config.json."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"the model path {str(path)!r} {problem_without_config(folder)}")
    return folder


def load_config(path: str | Path) -> PreTrainedConfig:
    """Return the folder's configuration, or raise ConfigurationError if it is missing or cannot be used."""
    folder = model_folder(path)
    check_model_folder(folder)
    try:
        config = AutoConfig.from_pretrained(folder, **LOCAL)
    except Exception as error:  # transformers may raise any exception for broken files
        raise ConfigurationError(f"the configuration in {folder} cannot be used: {error}") from error
    if hasattr(config, "auto_map"):
        # Remove the names of code files. Exports of the run contain no such files, and transformers' own class for the
        # model needs none
        del config.auto_map
    return config


def load_tokenizer(path: str | Path) -> Any:
    """Return the folder's tokenizer, or raise ConfigurationError if there is none, or it cannot be read."""
    folder = model_folder(path)
    check_model_folder(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    except Exception as error:  # transformers may raise any exception for a truncated file
        raise ConfigurationError(
            f"the tokenizer in {path} cannot be read ({error}): copy the tokenizer's files again"
        ) from error
    # Check this, because transformers would make an empty tokenizer if the files are missing, which decodes every
    # completion to "". Byte tokenizers need no files and name none
    names = sorted({*getattr(tokenizer, "vocab_files_names", {}).values()})
    if names and not any((folder / name).is_file() for name in {*names, *VOCABULARY_FILES}):
        raise ConfigurationError(
            f"{path} has no tokenizer ({' or '.join(names)}): put the model's tokenizer files (tokenizer.json, "
            f"{TOKENIZER_CONFIG_FILE}) into its folder"
        )
    return tokenizer


def load_causal_lm(path: str | Path, dtype: str | torch.dtype) -> PreTrainedModel:
    """Return the folder's causal LM on the CPU, with every weight in `dtype`.

    Raises:
        ConfigurationError: The folder contains no causal LM, or only a part of its weights.
    """
    folder = model_folder(path)
    config = load_config(path)
    refuse_pickles(folder)
    empty_causal_lm(path)  # refuses a configuration that describes more parameters than the files contain
    options: dict[str, Any] = {
        "dtype": torch_dtype(dtype),
        "use_safetensors": True,
        "output_loading_info": True,
    }
    model, loading_info = _loaded(folder, config, options)
    _refuse_other_weights(folder, model, loading_info)
    head = model.get_output_embeddings()
    embeddings = model.get_input_embeddings()
    is_tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    if is_tied and head is not None and head.weight is not embeddings.weight:
        raise ConfigurationError(
            f"config.json of {path} says tie_word_embeddings true, and the weights hold a head that differs from the "
            "embeddings, which the engines would ignore: set tie_word_embeddings to false, or remove the head's weight"
        )
    return model


def refuse_wrong_weights(path: str | Path) -> None:
    """Refuse weights that do not fit the configuration, without reading them: only their names and shapes are compared.

    The model is made on the "meta" device, where it takes no memory.

    Raises:
        ConfigurationError: transformers cannot make the model of the configuration, or the files lack a weight, or
            contain one of another shape or one that the model does not have.
    """
    folder = model_folder(path)
    config = load_config(path)
    empty_causal_lm(path)
    options: dict[str, Any] = {"device_map": "meta", "use_safetensors": True, "output_loading_info": True}
    with _without_load_report():
        model, loading_info = _loaded(folder, config, options | {"dtype": torch.float32})
    _refuse_other_weights(folder, model, loading_info)


def _is_of_a_further_layer(config: PreTrainedConfig, name: str) -> bool:
    """Return whether a weight belongs to an additional layer that predicts further tokens, as in DeepSeek's models."""
    num_layers = getattr(config, "num_hidden_layers", 0)
    num_further_layers = getattr(config, "num_nextn_predict_layers", None) or 0
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return bool(numbers) and num_layers <= numbers[0] < num_layers + num_further_layers


@contextmanager
def _without_load_report() -> Iterator[None]:
    """During the block, keep transformers from logging its table of missing and surplus weights. The error names them."""
    verbosity = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(verbosity)


def _loaded(
    folder: Path, config: PreTrainedConfig, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Return the folder's causal LM, and transformers' lists of missing and surplus weights."""
    try:
        model, loading_info = auto_class(config).from_pretrained(folder, config=config, **LOCAL, **options)
    except Exception as error:  # transformers may raise any exception for broken files
        raise ConfigurationError(
            f"no causal language model can be loaded from {folder}: {_wrong_shape(folder) or error}"
        ) from error
    return model, loading_info


def _refuse_other_weights(folder: Path, model: PreTrainedModel, loading_info: dict[str, Any]) -> None:
    """Raise ConfigurationError if the files lack weights of the model, or have weights of its parts that it does not use.

    Weights of other parts, such as a value head, are ignored: the model computes the same without them.
    """
    missing = sorted(loading_info["missing_keys"])
    if missing:
        raise ConfigurationError(
            f"the weights in {folder} lack {len(missing)} of the model's, such as {missing[0]}, which would be random: "
            "fetch the whole model (hf download NAME --local-dir FOLDER), or correct config.json"
        )
    surplus = sorted(name for name in loading_info["unexpected_keys"] if _is_of_a_part(model, name))
    if surplus:
        num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
        raise ConfigurationError(
            f"the weights in {folder} hold {len(surplus)} that the model of config.json does not have, such as "
            f"{surplus[0]}, so it would compute something else: correct config.json (num_hidden_layers is {num_layers}), "
            "or take config.json and weights of the same model"
        )


def _is_of_a_part(model: PreTrainedModel, name: str) -> bool:
    """Return whether a weight belongs, by its name, to a part of the model, such as `lm_head` or `model.layers`.

    Two kinds of weights do not count, because a model without them computes the same: masks and positions, which older
    files contain, and additional layers that only predict further tokens.
    """
    if name.endswith(BUFFER_NAMES) or _is_of_a_further_layer(model.config.get_text_config(), name):
        return False
    part_names = {child for child, _ in model.named_children()} - {model.base_model_prefix}
    part_names |= {child for child, _ in model.base_model.named_children()}
    return name.removeprefix(f"{model.base_model_prefix}.").partition(".")[0] in part_names


def _wrong_shape(folder: Path) -> str:
    """Describe a weight whose shape in the files differs from the shape in the configuration; "" if there is none."""
    shapes = weight_shapes(folder)
    for name, parameter in empty_causal_lm(folder).named_parameters():
        described_shape = list(parameter.shape)
        shape = shapes.get(name, described_shape)
        if shape != described_shape:
            return (
                f"{name} has the shape {shape} in the files, but {described_shape} by config.json: they do not belong "
                "together"
            )
    return ""


def empty_causal_lm(path: str | Path) -> PreTrainedModel:
    """Return the folder's causal LM in float32, without loading its weights.

    The parameters are on the "meta" device, where they take no memory, until weights are assigned to them.

    Raises:
        ConfigurationError: The configuration is not that of a causal LM, or describes far more weights than the folder
            contains.
    """
    config = load_config(path)
    try:
        _refuse_more_parameters_than_files(config, model_folder(path))
        with init_empty_weights(include_buffers=False):
            model = auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=False)
    except ConfigurationError:
        raise
    except Exception as error:  # transformers may raise any exception for broken files
        problem = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyError):
            problem = _unknown_value(config, error.args[0])
        raise ConfigurationError(f"no causal language model can be made of {path}: {problem}") from error
    model.tie_weights()  # before this call, head and embedding are separate parameters even if they are tied
    return model


def _unknown_value(config: PreTrainedConfig, value: Any) -> str:
    """Return what is wrong with a configuration if transformers did not find one of its values in a table."""
    names = [name for name, item in config.get_text_config().to_dict().items() if item == value]
    keys = f" ({' or '.join(names)})" if names else ""
    return f"config.json has the value {value!r}{keys}, which transformers does not know: correct it"


def _refuse_more_parameters_than_files(config: PreTrainedConfig, folder: Path) -> None:
    """Raise ConfigurationError if the configuration describes far more parameters than the folder's files contain.

    The parameters are counted on the "meta" device, which takes no memory. `init_empty_weights` would allocate each
    weight for a moment, and might run out of memory.
    """
    with torch.device("meta"):
        described = auto_class(config).from_config(config, trust_remote_code=False)
    described.tie_weights()
    refuse_more_parameters(folder, sum(weight.numel() for weight in described.parameters()))


def torch_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return torch's dtype of a name in DTYPES. Raise ConfigurationError for another name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigurationError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    return getattr(torch, dtype)


def model_fingerprint(path: str | Path) -> str:
    """Return the sha256 (hex) of architecture and vocabulary. A model and its checkpoints have the same fingerprint."""
    text_config = load_config(path).get_text_config()
    architecture = {name: getattr(text_config, name, None) for name in ARCHITECTURE_FIELDS}
    description = {"architecture": architecture, "vocabulary": _vocabulary(model_folder(path))}
    return hashlib.sha256(json.dumps(description, sort_keys=True, default=str).encode()).hexdigest()


def _vocabulary(folder: Path) -> Any:
    """Return the tokens and ids in tokenizer.json, or the digest of another vocabulary file; None if there is none.

    The other contents of tokenizer.json are left out, because they depend on the version of the library that wrote it.
    """
    if (folder / "tokenizer.json").is_file():
        try:
            tokenizer = read_json(folder / "tokenizer.json", MAX_TOKENIZER_BYTES, follow_links=True)
            added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
            return {"vocab": tokenizer.get("model", {}).get("vocab"), "added": added}
        except Exception as error:  # transformers may raise any exception for broken files
            raise ConfigurationError(f"the tokenizer in {folder} cannot be read ({error})") from error
    for name in ("tokenizer.model", "vocab.json"):
        if (folder / name).is_file():
            return hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return None


def stop_token_ids(path: str | Path) -> tuple[int, ...]:
    """Return the ids of all tokens that end a sequence, in ascending order.

    Chat models name several such ids, in different files. If one were missing here, completions that end with it would
    count as truncated.

    Raises:
        ConfigurationError: No file of the folder names an end token, or one names an id that is not in the vocabulary.
    """
    folder = model_folder(path)
    vocab_size = load_config(folder).get_text_config().vocab_size
    ids: set[int] = set()
    for source, candidate in _end_tokens(folder):
        token_ids = candidate if isinstance(candidate, list) else [candidate]
        for token_id in token_ids:
            if token_id is None:
                continue
            if not 0 <= token_id < vocab_size:
                raise ConfigurationError(
                    f"{folder}: the end token {token_id} is outside the model's vocabulary of {vocab_size} tokens "
                    f"(eos_token_id in {source}), so no completion would end with it: correct the number, or remove it"
                )
            ids.add(token_id)
    if not ids:
        raise ConfigurationError(f"{folder} has no end token; add eos_token_id to generation_config.json")
    return tuple(sorted(ids))


def _end_tokens(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the end tokens that the folder's files name, as pairs of the file and the value of its eos_token_id.

    `check_model_folder` has checked that each value is None, a token id, or a list of token ids.
    """
    yield "config.json", load_config(folder).get_text_config().eos_token_id
    if (folder / "generation_config.json").is_file():
        settings = read_json(folder / "generation_config.json", follow_links=True)
        yield "generation_config.json", settings.get("eos_token_id")
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield TOKENIZER_CONFIG_FILE, load_tokenizer(folder).eos_token_id


def context_length(path: str | Path) -> int:
    """Return the maximum number of tokens, prompt and completion together, for which the model has positions."""
    length = getattr(load_config(path).get_text_config(), "max_position_embeddings", None)
    if type(length) is not int:
        raise ConfigurationError(f"{path}/config.json does not say max_position_embeddings; add it")
    if length < FEWEST_POSITIONS:
        raise ConfigurationError(
            f"{path}/config.json says max_position_embeddings {length}, which has no room for a prompt and a completion: "
            "correct it"
        )
    return int(length)
