"""The settings of a run's LoRA adapter, from its options, its model and the folder of its initial adapter."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import LORA_RANKS
from async_grpo.messages import LoraSettings
from async_grpo.modeling.flow.folder import is_flow_folder, read_flow_folder
from async_grpo.modeling.four_bit import BLOCK, can_be_four_bit
from async_grpo.modeling.load import empty_causal_lm
from async_grpo.modeling.lora import (
    FILE_PREFIX,
    layers_in_file,
    layers_of_targets,
    linear_layers,
    read_lora_config,
    read_lora_tensors,
    refuse_unfitting,
    scaling_of,
)
from async_grpo.training.lora_config import ALL_LINEAR, LoraConfig

log = logging.getLogger(__name__)
# Prefixes of the blocks in models of diffusers. Linear layers outside of blocks, such as the embedding of the time, get
# no adapter by default
BLOCKS = ("transformer_blocks.", "single_transformer_blocks.")


def lora_settings(config: LoraConfig, model_path: str) -> LoraSettings | None:
    """Return the settings of the adapter to train; None if all weights are trained.

    Raises:
        ConfigurationError: A name in --lora-targets is not the name of a layer, or the initial adapter does not fit the
            model or the options.
    """
    if not config.has_lora:
        return None
    model = _empty_model(model_path)
    if config.init_adapter is not None:
        settings = _initial_settings(config, Path(config.init_adapter).expanduser().absolute(), model_path)
        refuse_other_model(model, settings)
    else:
        layers = linear_layers(model)
        if is_flow_folder(model_path):
            layers = [name for name in layers if name.startswith(BLOCKS)]
        if config.lora_targets != ALL_LINEAR:
            layers = layers_of_targets(model, config.lora_target_names)
        settings = LoraSettings(
            config.lora_rank, config.lora_scaling, tuple(sorted(layers)), config.lora_sync
        )
        refuse_unfitting(model, settings)
    if settings.sync == "adapter" and settings.rank > LORA_RANKS[-1]:
        raise ConfigurationError(
            f"--lora-sync adapter: engines apply adapters of at most rank {LORA_RANKS[-1]}, not {settings.rank}: choose "
            "a lower --lora-rank, or --lora-sync merged, with which every rank is served"
        )
    _log_size(model, settings)
    _warn_about_experts(model)
    return with_four_bits(model, settings) if config.load_in_4bit else settings


def with_four_bits(model: Any, settings: LoraSettings) -> LoraSettings:
    """Return the settings with the names of the layers whose frozen weights can be stored in 4 bits, and log their share.

    Raises:
        ConfigurationError: There is no such layer.
    """
    candidates = linear_layers(model)
    names = [name for name in candidates if can_be_four_bit(model.get_submodule(name))]
    if not names:
        raise ConfigurationError(
            f"--load-in-4bit: no linear layer of the model has a multiple of {BLOCK} inputs, as blocks of 4-bit weights "
            "need it: leave the option out"
        )
    num_four_bit = sum(model.get_submodule(name).weight.numel() for name in names)
    num_weights = sum(weight.numel() for weight in model.parameters())
    log.info(
        "%.2f M of the %.2f M frozen parameters are stored in 4 bits, in %d of %d linear layers",
        num_four_bit / 1e6,
        num_weights / 1e6,
        len(names),
        len(candidates),
    )
    return replace(settings, four_bit_layers=tuple(names), num_four_bit_weights=num_four_bit)


def _empty_model(model_path: str) -> Any:
    """Return a model without weights: of transformers, or the transformer of a folder of diffusers."""
    return (
        read_flow_folder(model_path).empty_model()
        if is_flow_folder(model_path)
        else empty_causal_lm(model_path)
    )


def _initial_settings(config: LoraConfig, folder: Path, model_path: str) -> LoraSettings:
    """Return the settings of the adapter in a folder.

    Raises:
        ConfigurationError: The folder contains no such adapter, or the options ask for another rank.
    """
    settings = settings_of_folder(folder, model_path, config.lora_sync)
    if config.lora_rank not in (0, settings.rank):
        raise ConfigurationError(
            f"--lora-rank {config.lora_rank}: the adapter in --init-adapter {folder} has the rank {settings.rank}: leave "
            "--lora-rank out"
        )
    return settings


def settings_of_folder(folder: Path, model_path: str, sync: str) -> LoraSettings:
    """Return the settings of the adapter in a folder. Warn if it names another base than the model.

    Args:
        folder: A folder in peft's format.
        model_path: The model to which the adapter is to be applied.
        sync: How the adapter reaches the engines.

    Raises:
        ConfigurationError: The folder contains no adapter that computes W + s B A.
    """
    description = read_lora_config(folder)
    base = description.get("base_model_name_or_path")
    if isinstance(base, str) and not _has_part(model_path, Path(base).name):
        log.warning(
            "the adapter in %s was trained on %.120r and is used with %s: an adapter computes what it learned only on its "
            "own base",
            folder,
            base,
            model_path,
        )
    layers = tuple(layers_in_file(folder))
    return LoraSettings(description["r"], scaling_of(description), layers, sync, str(folder))


def _has_part(model_path: str, name: str) -> bool:
    """Return whether a folder in a path has this model name, which in the hub's cache is "models--Qwen--Qwen3-4B"."""
    return any(part == name or part.endswith(f"--{name}") for part in Path(model_path).parts)


def refuse_other_model(model: Any, settings: LoraSettings) -> None:
    """Refuse an adapter in a folder whose layers, shapes or values do not fit the model.

    Raises:
        ConfigurationError: See `refuse_unfitting` and `read_lora_tensors`.
    """
    refuse_unfitting(model, settings)
    shapes = {}
    for name in settings.layers:
        out_features, in_features = model.get_submodule(name).weight.shape
        prefix = f"{FILE_PREFIX}{name}"
        shapes[f"{prefix}.lora_A.weight"] = (settings.rank, in_features)
        shapes[f"{prefix}.lora_B.weight"] = (out_features, settings.rank)
    read_lora_tensors(Path(settings.initial_folder), shapes)


def _warn_about_experts(model: Any) -> None:
    """Warn that stacked matrices, such as those of experts, get no adapter, because they are no linear layers."""
    num_stacked = 0
    names = set()
    for name, weight in model.named_parameters():
        # A vision tower gets no adapter at all, so do not warn about its first layer, a convolution
        if weight.dim() > 2 and ".visual." not in name:
            num_stacked += weight.numel()
            names.add(".".join(name.split(".")[-2:]))
    if num_stacked:
        log.warning(
            "LoRA: %s get no adapter and stay frozen, because they are no linear layers: %.2f M of the model's %.2f M "
            "parameters (docs/lora.md)",
            ", ".join(sorted(names)),
            num_stacked / 1e6,
            sum(weight.numel() for weight in model.parameters()) / 1e6,
        )


def _log_size(model: Any, settings: LoraSettings) -> None:
    """Log how many parameters are trained and how many are frozen, so that the user notices layers without an adapter."""
    num_trained = 0
    for name in settings.layers:
        num_trained += settings.rank * sum(model.get_submodule(name).weight.shape)
    num_weights = sum(weight.numel() for weight in model.parameters())
    names = sorted({name.rpartition(".")[2] for name in settings.layers})
    log.info(
        "LoRA of rank %d, scaled by %.3g, on %d layers (%s): %.2f M parameters are trained, %.2f M are frozen",
        settings.rank,
        settings.scaling,
        len(settings.layers),
        ", ".join(names),
        num_trained / 1e6,
        num_weights / 1e6,
    )
