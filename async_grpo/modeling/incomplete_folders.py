"""Recognize folders that are not a complete model: adapters, weights in other formats, and incomplete downloads.

Such folders are common. The error messages of transformers, vLLM and safetensors do not say what is wrong with them.
"""

import json
import re
from collections import defaultdict
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.processes.hub import is_hub_name
from async_grpo.processes.untrusted_files import is_regular, open_regular, read_json

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_WEIGHTS_FILE = "model.safetensors"
# Patterns of files with weights in formats that this library does not read, and the names of the formats
OTHER_FORMATS = {
    "*.gguf": "GGUF, the format of llama.cpp",
    "*.h5": "the format of TensorFlow",
    "*.msgpack": "the format of Flax",
    "*.onnx": "ONNX",
    "*.mlmodel": "Core ML",
}
GGUF_WAY_OUT = (
    "fetch the model in safetensors (hf download NAME --local-dir FOLDER), or convert it "
    "(async-grpo data model --gguf FILE)"
)
LFS_BEGINNING = b"version https://git-lfs.github.com/spec/"
LFS_WAY_OUT = "fetch its content (`git lfs pull` in the folder, or hf download NAME --local-dir FOLDER)"
SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")
# Number of bytes at the beginning of a file that are examined, and shown if they are text
NUM_BEGINNING_BYTES = 60
NUM_HINTED_FOLDERS = 3  # maximum number of other folders that a message proposes
MERGE = (
    "merge it (async-grpo export ADAPTER --merged --output-dir FOLDER), or train it further (--init-adapter ADAPTER "
    "--model-name-or-path BASE)"
)


def refuse_adapter(folder: Path) -> None:
    """Raise ConfigurationError if a folder contains the files of an adapter, such as LoRA, with or without a model.

    transformers would load the base model that the adapter names, and engines would use the adapter's weights as
    weights of the model.
    """
    if (folder / ADAPTER_CONFIG_FILE).exists():
        has_model = (folder / "config.json").exists()
        remove = ""
        if has_model:
            remove = (
                f"; if the model in the folder is complete without the adapter, remove {ADAPTER_CONFIG_FILE} and "
                f"{ADAPTER_WEIGHTS_FILE}"
            )
        raise ConfigurationError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG_FILE}) of another model; its base is {_base_model(folder)}: "
            f"{MERGE}{remove}"
        )
    if (folder / ADAPTER_WEIGHTS_FILE).exists():
        raise ConfigurationError(
            f"{folder} holds the weights of an adapter ({ADAPTER_WEIGHTS_FILE}), which the engines would take for the "
            f"model's: remove the file, or {MERGE}"
        )


def base_of_adapter(folder: Path) -> str:
    """Return the folder of the model to which an adapter belongs, or the model's name on the hub.

    Raises:
        ConfigurationError: The adapter does not name its model, or the model's folder does not exist here.
    """
    base = _named_base(folder)
    if base is None:
        raise ConfigurationError(
            f"{folder} holds an adapter, and {ADAPTER_CONFIG_FILE} does not name its model: give --init-adapter {folder} "
            "--model-name-or-path BASE"
        )
    # A relative path starts either at the folder in which the adapter was trained, or at the adapter's own folder
    for path in (Path(base).expanduser(), folder / base):
        if (path / "config.json").is_file():
            return str(path)
    if is_hub_name(base):
        return base
    raise ConfigurationError(
        f"{folder} holds an adapter of the model {base!r:.120}, which is no folder here: give --init-adapter {folder} "
        "--model-name-or-path BASE"
    )


def _base_model(folder: Path) -> str:
    """Return the name of the model for which an adapter was trained, for an error message."""
    name = _named_base(folder)
    return "not named in it" if name is None else f"{name!r:.120}"


def _named_base(folder: Path) -> str | None:
    """Return the model that a folder's adapter_config.json names, or None if it names none or cannot be read."""
    try:
        name = read_json(folder / ADAPTER_CONFIG_FILE, follow_links=True).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return name if isinstance(name, str) and name and "\0" not in name else None


def problem_without_config(path: Path) -> str:
    """Describe what is at a path without a `config.json`, and what the user can do about it.

    The caller puts the text after the path, so that path and text form one sentence.
    """
    fetch = (
        "give a local folder in the Hugging Face format (`hf download NAME --local-dir FOLDER` fetches one)"
    )
    if path.suffix == ".gguf" and path.is_file():
        return f"is a file in {OTHER_FORMATS['*.gguf']}: {GGUF_WAY_OUT}"
    if path.is_file() and (path.parent / "config.json").is_file():
        return f"is a file: give its folder, {path.parent}"
    if not path.is_dir() and is_hub_name(str(path)):
        return f"is not a folder; only `async-grpo run`, `eval` and `doctor` fetch models of the hub by name: {fetch}"
    if not path.is_dir():
        return f"is not a folder; {fetch}"
    refuse_adapter(path)
    ggufs = _names(path, "*.gguf")
    if ggufs:
        return f"has no config.json, but {ggufs[0]}, in {OTHER_FORMATS['*.gguf']}: {GGUF_WAY_OUT}"
    if (path / "model_index.json").is_file():
        return "is a folder of diffusers, whose models draw: train one by `async-grpo run --policy flow --engine drawing`"
    models = [file.parent for file in _configs_below(path)[:NUM_HINTED_FOLDERS]]
    if models:
        names = ", ".join(map(str, models))
        return f"has no config.json; models lie in {names}: give one of these folders"
    return f"has no config.json; {fetch}"


def _configs_below(folder: Path) -> list[Path]:
    """Return the `config.json` files one or two levels below a folder, as in folders of checkpoints and the hub's cache."""
    return [*sorted(folder.glob("*/config.json")), *sorted(folder.glob("*/*/config.json"))]


def problem_without_weights(folder: Path) -> str:
    """Describe the weights of a folder without safetensors, and what the user can do; "" if their format is unknown."""
    for pattern, name in OTHER_FORMATS.items():
        files = _names(folder, pattern)
        if files:
            way_out = GGUF_WAY_OUT if pattern == "*.gguf" else "fetch the model in safetensors"
            return f"its weights ({files[0]}) are in {name}, which is not read: {way_out}"
    return ""


def _names(folder: Path, pattern: str) -> list[str]:
    return sorted(file.name for file in folder.glob(pattern))


def refuse_lfs_pointer(path: Path) -> None:
    """Raise ConfigurationError if a file is only a pointer of git-lfs, because its content was not fetched."""
    if _beginning(path).startswith(LFS_BEGINNING):
        raise ConfigurationError(f"{path} is a pointer of git-lfs, and not the file itself: {LFS_WAY_OUT}")


def content_instead_of_weights(path: Path) -> str:
    """Describe the content of an unreadable file of weights, such as a server's error message; "" if it is unknown."""
    if not is_regular(path, follow_links=True):
        return ""
    beginning = _beginning(path)
    if not beginning:
        return "; the file is empty"
    try:
        text = beginning.decode("ascii")
    except UnicodeDecodeError:
        return ""
    is_readable = all(character.isprintable() or character.isspace() for character in text)
    return f"; the file is a text that begins with {json.dumps(text)}" if is_readable else ""


def _beginning(path: Path) -> bytes:
    try:
        with open_regular(path, follow_links=True) as file:
            return file.read(NUM_BEGINNING_BYTES)
    except OSError:
        return b""


def refuse_incomplete_shards(folder: Path) -> None:
    """Raise ConfigurationError if a model that consists of several files lacks one of them, or its index.

    If there is an index, nothing is checked here: `model_files.weight_shapes` compares the files with the index.
    """
    if (folder / INDEX_FILE).exists() or (folder / SINGLE_WEIGHTS_FILE).exists():
        return
    numbers_by_model: dict[tuple[str, int], set[int]] = defaultdict(set)
    for file in folder.glob("*.safetensors"):
        match = SHARD_NAME.fullmatch(file.name)
        if match:
            numbers_by_model[match["stem"], int(match["total"])].add(int(match["number"]))
    fetch = "fetch the whole model (hf download NAME --local-dir FOLDER)"
    for (stem, total), numbers in sorted(numbers_by_model.items()):
        missing = sorted({*range(1, total + 1)} - numbers)
        if missing:
            raise ConfigurationError(
                f"{folder} has {len(numbers)} of the {total} files of its weights, and lacks "
                f"{stem}-{missing[0]:05}-of-{total:05}.safetensors: {fetch}"
            )
    names = _names(folder, "*.safetensors")
    if names:
        raise ConfigurationError(
            f"{folder} has weights ({names[0]}), but neither {SINGLE_WEIGHTS_FILE} nor {INDEX_FILE}, which names the "
            f"files of larger models: {fetch}; a single file must be named {SINGLE_WEIGHTS_FILE}"
        )
