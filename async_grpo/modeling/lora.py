"""LoRA adapters in the policy: puts peft's layers into a model, and names their tensors as peft's files do.

Only the layers that get an adapter change: `layer` becomes peft's layer, with the frozen weight as `layer.base_layer`
and the adapter as `layer.lora_A` and `layer.lora_B`. All other code sees the names of the model without adapters:
`named_weights` yields merged weights under these names.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from async_grpo.errors import ConfigurationError
from async_grpo.messages import LoraSettings
from async_grpo.modeling.incomplete_folders import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from async_grpo.processes.untrusted_files import read_json

ADAPTER_NAME = "default"  # peft's name of an adapter; a model has only this one
FILE_PREFIX = "base_model.model."  # peft's files name the tensors of a model with this prefix
BASE_LAYER = ".base_layer."  # part of the names of weights in layers with an adapter
# Fields of adapter_config.json that change what an adapter computes, with the values for which it computes W + s B A
PLAIN_LORA = {
    "use_dora": (False,),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "layer_replication": (None,),
    "use_qalora": (False,),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    # All other ways to set initial values, such as PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA, also change the base
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# Maximum of a rank in adapter_config.json. Larger numbers are nonsense, and a division of them may overflow
MAX_RANK = 1 << 20
MAX_ALPHA = 1e9
TENSOR_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def add_lora(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Add empty adapters to the layers that `settings` names, and freeze all other weights.

    Call `fill_lora` for the adapters' values after the model's weights are loaded.

    Raises:
        ConfigurationError: See `refuse_unfitting`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from async_grpo.modeling.lora_layer import LeanLoraLinear

    refuse_unfitting(model, settings)
    # peft scales the adapter by lora_alpha / r
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.scaling * settings.rank,  # type: ignore[arg-type]  # peft accepts fractions
        target_modules=list(settings.layers),
        task_type="CAUSAL_LM",
    )
    config._register_custom_module({nn.Linear: LeanLoraLinear})
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, low_cpu_mem_usage=True)


def refuse_unfitting(model: PreTrainedModel, settings: LoraSettings) -> None:
    """Refuse settings of an adapter that the model cannot have.

    Raises:
        ConfigurationError: A layer is no linear layer of the model, or the rank is larger than the number of inputs and
            the number of outputs of every layer.
    """
    candidates = {name: model.get_submodule(name) for name in linear_layers(model)}
    if not settings.layers:
        raise ConfigurationError(
            "the model has no linear layer that could get a LoRA adapter: leave out --lora-rank, which trains all weights"
        )
    missing = [name for name in settings.layers if name not in candidates]
    if missing:
        raise ConfigurationError(
            f"the adapter has tensors for {missing[0]!r:.120}, which is the head or no linear layer of the model: give the "
            "model for which the adapter was trained, or merge the adapter with peft (merge_and_unload)"
        )
    largest = max(max(candidates[name].weight.shape) for name in settings.layers)
    if not 1 <= settings.rank <= largest:
        raise ConfigurationError(
            f"--lora-rank {settings.rank}: an adapter of this rank does not fit layers of at most {largest} inputs and "
            f"outputs: give a rank between 1 and {largest}; 8 to 64 is usual"
        )


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of all linear layers except the head and those of a vision tower, in the model's order."""
    head = getattr(model, "get_output_embeddings", lambda: None)()  # models of diffusers have no such method
    vision_tower = getattr(getattr(model, "base_model", None), "visual", None)
    modules_of_tower = set() if vision_tower is None else set(vision_tower.modules())
    names = []
    for name, module in model.named_modules():
        is_candidate = module is not head and module not in modules_of_tower
        if isinstance(module, nn.Linear) and is_candidate:
            names.append(name)
    return names


def layers_of_targets(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Return the names of the linear layers that `--lora-targets` names by their last parts, such as "q_proj".

    Raises:
        ConfigurationError: A target names no layer, or one that cannot have an adapter.
    """
    candidates = linear_layers(model)
    last_parts = sorted({name.rpartition(".")[2] for name in candidates})
    head = getattr(model, "get_output_embeddings", lambda: None)()  # models of diffusers have no such method
    target_layers = set()
    for target in targets:
        layers = [name for name in candidates if _has_name(name, target)]
        if not layers:
            modules = [module for name, module in model.named_modules() if _has_name(name, target)]
            reason = "is no layer of the model"
            if modules:
                reason = "is the head, which gets no adapter" if modules[0] is head else "is no linear layer"
            raise ConfigurationError(
                f"--lora-targets: {target!r} {reason}; layers that can have an adapter: {', '.join(last_parts)}"
            )
        target_layers.update(layers)
    return [name for name in candidates if name in target_layers]


def _has_name(layer: str, target: str) -> bool:
    """Return whether a target is a layer's name, or its last parts."""
    return layer == target or layer.endswith(f".{target}")


def lora_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of each layer with an adapter, in the model's order."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            yield name, module


def has_lora(model: nn.Module) -> bool:
    """Return whether a layer of the model has an adapter."""
    return next(lora_modules(model), None) is not None


def name_without_adapter(name: str) -> str:
    """Return the name of a frozen weight in the model without adapters.

    >>> name_without_adapter("model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(BASE_LAYER, ".")


def named_lora_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in peft's file, tensor) of all adapters, in the model's order. A sharded model yields its shards."""
    for layer_name, layer in lora_modules(model):
        for part in ("lora_A", "lora_B"):
            yield f"{FILE_PREFIX}{layer_name}.{part}.weight", getattr(layer, part)[ADAPTER_NAME].weight


def layer_of(file_name: str) -> str:
    """Return the layer to which a tensor of an adapter's file belongs.

    >>> layer_of("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    'model.layers.0.self_attn.q_proj'
    """
    return file_name.removeprefix(FILE_PREFIX).rpartition(".lora_")[0]


@torch.no_grad()
def fill_lora(model: nn.Module, settings: LoraSettings, seed: int, device: torch.device) -> None:
    """Give the adapters their initial values, in float32: those of the initial folder, or new ones.

    Every rank computes the same values, and keeps its own shard.

    Args:
        model: A model with adapters, sharded or not.
        settings: The settings with which the adapters were added.
        seed: Seed of new adapters.
        device: The device that stores the adapters.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in named_lora_tensors(model)}
    if settings.initial_folder:
        values = read_lora_tensors(Path(settings.initial_folder), shapes)
    else:
        values = new_lora_tensors(shapes, seed)
    for layer_name, layer in lora_modules(model):
        for part in ("lora_A", "lora_B"):
            linear = getattr(layer, part)[ADAPTER_NAME]
            value = values[f"{FILE_PREFIX}{layer_name}.{part}.weight"].to(device, torch.float32)
            if isinstance(linear.weight, DTensor):
                shard = linear.weight
                # All ranks have the whole value, so nothing needs to be sent
                value = distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
            linear.weight = nn.Parameter(value)


def new_lora_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Return the tensors of new adapters: A uniform in +- 1 / sqrt(in) as in peft, and B zero.

    With B zero, the policy is at first the base model.
    """
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in shapes.items():
        if ".lora_B." in name:
            values[name] = torch.zeros(shape)
        else:
            bound = shape[1] ** -0.5
            values[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    return values


def read_lora_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's adapter_config.json.

    Raises:
        ConfigurationError: The file is missing or unreadable, or describes something else than W + s B A.
    """
    path = folder / ADAPTER_CONFIG_FILE
    if not path.is_file():
        raise ConfigurationError(f"{folder} holds no adapter: it has no {ADAPTER_CONFIG_FILE}")
    try:
        config = read_json(path, follow_links=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise ConfigurationError(f"{path} describes an adapter of the type {kind!r}; only LORA is supported")
    for field, plain_values in PLAIN_LORA.items():
        value = config.get(field)
        if value is not None and value not in plain_values:
            raise ConfigurationError(
                f"{path}: {field} is {value!r:.80}, which is not supported: train a plain LoRA adapter, or merge this one "
                "with peft (merge_and_unload)"
            )
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ConfigurationError(f"{path}: r is {rank!r:.40}: it must be a whole number from 1 to {MAX_RANK}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= MAX_ALPHA:
        raise ConfigurationError(
            f"{path}: lora_alpha is {alpha!r:.40}: it must be a number above 0 (at most {MAX_ALPHA:g}), because it "
            "scales the adapter"
        )
    return config


def scaling_of(config: Mapping[str, Any]) -> float:
    """Return the factor s of W + s B A of an adapter_config.json.

    >>> scaling_of({"r": 16, "lora_alpha": 32}), scaling_of({"r": 16, "lora_alpha": 32, "use_rslora": True})
    (2.0, 8.0)
    """
    divisor = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    return float(config["lora_alpha"] / divisor)


def layers_in_file(folder: Path) -> list[str]:
    """Return the names of the layers whose adapters a folder contains, sorted.

    Raises:
        ConfigurationError: The weights are missing or unreadable, or not those of linear layers' adapters.
    """
    names = _load_tensors(folder)
    if not names:
        raise ConfigurationError(f"{folder / ADAPTER_WEIGHTS_FILE} holds no tensor: copy the adapter again")
    for name in names:
        if not (name.startswith(FILE_PREFIX) and name.endswith((".lora_A.weight", ".lora_B.weight"))):
            raise ConfigurationError(
                f"the adapter in {folder} has the tensor {name!r:.120}, which is no matrix A or B of a linear layer: train "
                "an adapter of linear layers alone, or merge this one with peft (merge_and_unload)"
            )
    return sorted({layer_of(name) for name in names})


def read_lora_tensors(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors of an adapter's folder, by peft's names.

    Args:
        folder: A folder in peft's format.
        shapes: The shapes of all tensors that the model needs.

    Raises:
        ConfigurationError: The file lacks a tensor, has a further one, one of another shape, or one with values that are
            no finite numbers.
    """
    tensors = _load_tensors(folder)
    problems = []
    for name, shape in shapes.items():
        if name not in tensors:
            problems.append(f"lacks {name}")
        elif tuple(tensors[name].shape) != shape:
            problems.append(f"has {name} of the shape {list(tensors[name].shape)} in place of {list(shape)}")
    problems += [f"has {name}, which the model has no layer for" for name in tensors if name not in shapes]
    if problems:
        raise ConfigurationError(
            f"the adapter in {folder} does not fit the model: it {problems[0]} ({len(problems)} such differences): give "
            "the model for which it was trained"
        )
    for name, tensor in tensors.items():
        if tensor.dtype not in TENSOR_DTYPES:
            raise ConfigurationError(
                f"the adapter in {folder} has {name} of the type {tensor.dtype}: save it as float32, bfloat16 or float16"
            )
        if not tensor.isfinite().all():
            raise ConfigurationError(
                f"the adapter in {folder} has values in {name} that are no finite numbers, so its policy would compute "
                "nothing: give an earlier state of the adapter"
            )
    return tensors


def _load_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / ADAPTER_WEIGHTS_FILE
    if not path.is_file():
        raise ConfigurationError(f"{folder} has no {ADAPTER_WEIGHTS_FILE}: save the adapter as safetensors")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}: copy the adapter again") from error


def write_lora_folder(
    folder: Path, tensors: Mapping[str, Tensor], settings: LoraSettings, base_model: str, dtype: torch.dtype
) -> None:
    """Write an adapter into an existing folder, in the format that peft and vLLM load.

    Args:
        folder: The folder.
        tensors: The adapter's tensors by peft's names.
        settings: The settings of the adapter.
        base_model: Path or name of the model to which the adapter belongs.
        dtype: The dtype of the written tensors.
    """
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": settings.rank,
        # peft and vLLM compute lora_alpha / r. Write a whole number if that gives the same scale
        "lora_alpha": _whole_if_possible(settings.scaling * settings.rank),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": _short_names(settings.layers),
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / ADAPTER_CONFIG_FILE).write_text(text, encoding="utf-8")
    contents = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(contents, folder / ADAPTER_WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / ADAPTER_WEIGHTS_FILE).chmod((folder / ADAPTER_CONFIG_FILE).stat().st_mode)


def _whole_if_possible(value: float) -> int | float:
    """Return the value as an integer if it is one, up to rounding in its last bits."""
    return round(value) if abs(value - round(value)) < 1e-9 * abs(value) else value


def _short_names(layers: Iterable[str]) -> list[str]:
    """Return the last parts of the layers' names. peft and vLLM compare them with the names of all layers.

    If only some layers with such a name have an adapter, the file has no tensors for the others, which then get none.
    """
    return sorted({name.rpartition(".")[2] for name in layers})


@contextmanager
def lora_switched_off(model: nn.Module) -> Iterator[None]:
    """During the block, the model computes without its adapters, as the base model."""
    layers = [layer for _, layer in lora_modules(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
