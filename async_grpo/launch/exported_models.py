"""Read the weights of a checkpoint or of a LoRA adapter, and write them as a model or as an adapter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.flow.config import DIFFUSION_NFT, FLOW
from async_grpo.config.base_weights import refuse_other_base
from async_grpo.config.lora import with_four_bits
from async_grpo.errors import CheckpointBroken, ConfigurationError
from async_grpo.messages import LoraSettings
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.modeling.flow.policy import FlowPolicy
from async_grpo.modeling.four_bit import put_in_four_bits
from async_grpo.modeling.incomplete_folders import base_of_adapter
from async_grpo.modeling.load import empty_causal_lm, load_causal_lm, model_folder, torch_dtype
from async_grpo.modeling.lora import (
    add_lora,
    fill_lora,
    layers_in_file,
    named_lora_tensors,
    read_lora_config,
    scaling_of,
)
from async_grpo.modeling.policy import PolicyModel, named_full_tensors, value_head_tensors
from async_grpo.training.checkpoint import load_reference_weights, load_weights
from async_grpo.training.checkpoint_folder import Manifest
from async_grpo.training.drawing.export import write_flow_folder
from async_grpo.training.export import VALUE_HEAD_FILE, load_value_head, write_adapter, write_model

CPU = torch.device("cpu")


def export_checkpoint(
    folder: Path, manifest: Manifest, target: Path, base: str, dtype: str, *, merged: bool
) -> None:
    """Write the policy of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        manifest: Its verified manifest.
        target: The folder to write.
        base: Folder of the model from which the run started; "" for the folder that the run names.
        dtype: Name of the dtype of a whole model.
        merged: Whether to write a whole model although the run trained an adapter.

    Raises:
        ConfigurationError: The checkpoint does not name its model, or the model cannot be loaded, or has other weights
            than the base of the checkpoint's adapter.
        CheckpointBroken: The checkpoint's weights are not those that its manifest describes.
    """
    source = base or manifest.options.get("model_name_or_path")
    if not isinstance(source, str) or "\0" in source:
        raise ConfigurationError(
            f"{folder} does not say of which model it is (model_name_or_path in its manifest): give --base FOLDER"
        )
    refuse_other_base(manifest, folder, source)
    if manifest.options.get("policy") == FLOW:
        _export_flow_checkpoint(folder, manifest, source, target, dtype)
        return
    settings = _settings_of(folder, manifest)
    if settings is not None:
        # Do not load the initial adapter: the checkpoint has newer values
        settings = replace(settings, initial_folder="")
    policy = _policy(source, settings, has_critic=_has_value_head(manifest))
    load_weights(policy, folder)
    if settings is not None and not merged:
        tensors = {name: tensor.detach() for name, tensor in named_lora_tensors(policy.model)}
        write_adapter(tensors, settings, value_head_tensors(policy), target, source=model_folder(source))
        return
    _write_whole(policy, target, source, dtype)


def _export_flow_checkpoint(folder: Path, manifest: Manifest, source: str, target: Path, dtype: str) -> None:
    """Write a policy that draws as a folder of diffusers, with its LoRA adapter added to the weights.

    Args:
        folder: Folder of the checkpoint.
        manifest: Its manifest.
        source: Folder of the model with which the run began.
        target: The folder to write.
        dtype: Name of the dtype of the written weights.
    """
    flow_folder = read_flow_folder(source)
    policy: Any = FlowPolicy.of_folder(flow_folder, num_steps=1, noise_level=0.0)
    settings = _settings_of(folder, manifest)
    if settings is not None:
        add_lora(policy.model, settings)
        # This gives the adapter initial values, which those of the checkpoint replace below
        fill_lora(policy.model, settings, seed=0, device=CPU)
    if manifest.options.get("flow_loss") == DIFFUSION_NFT:
        # The policy that draws and is evaluated is the old one
        load_reference_weights(policy, folder)
    else:
        load_weights(policy, folder)
    weights = {}
    for name, tensor in named_full_tensors(policy):
        weights[name] = tensor.detach().to(torch_dtype(dtype), copy=True)
    write_flow_folder(weights, flow_folder.path, target)


def export_adapter(folder: Path, target: Path, base: str, dtype: str, *, in_4bit: bool) -> None:
    """Write the model of an adapter: its base with the adapter added to the weights.

    Args:
        folder: Folder of the adapter, in peft's format.
        target: The folder to write.
        base: Folder of the base; "" for the one that the adapter names.
        dtype: Name of the dtype of the written weights.
        in_4bit: Whether the adapter was trained on the values that its base had in 4 bits.

    Raises:
        ConfigurationError: The adapter or its base cannot be used.
    """
    source = base or base_of_adapter(folder)
    description = read_lora_config(folder)
    settings = LoraSettings(
        rank=description["r"],
        scaling=scaling_of(description),
        layers=tuple(layers_in_file(folder)),
        initial_folder=str(folder),
    )
    if in_4bit:
        settings = with_four_bits(empty_causal_lm(source), settings)
    policy = _policy(source, settings, has_critic=(folder / VALUE_HEAD_FILE).is_file())
    fill_lora(policy.model, settings, seed=0, device=CPU)
    load_value_head(policy, folder)
    _write_whole(policy, target, source, dtype)


def _has_value_head(manifest: Manifest) -> bool:
    """Return whether the policy of a checkpoint has a value head: it has a critic, and that is not a separate model."""
    estimator = ADVANTAGE_ESTIMATORS.get(str(manifest.options.get("advantage_estimator")))
    has_critic = estimator is not None and estimator.needs_critic
    return has_critic and manifest.options.get("critic_model") is None


def _settings_of(folder: Path, manifest: Manifest) -> LoraSettings | None:
    """Return the settings of the adapter in a checkpoint; None if the checkpoint contains all weights.

    Raises:
        CheckpointBroken: The manifest describes no adapter that this version knows.
    """
    if not manifest.lora:
        return None
    try:
        return TypeAdapter(LoraSettings).validate_python(manifest.lora)
    except ValidationError as error:
        raise CheckpointBroken(f"{folder}: lora in its manifest: {error.errors()[0]['msg']}") from error


def _policy(source: str, settings: LoraSettings | None, *, has_critic: bool) -> PolicyModel:
    """Return the policy with the model in the folder `source`, in float32, and an adapter if there are settings of one."""
    model = load_causal_lm(source, "float32")
    if settings is not None:
        add_lora(model, settings)
        # Values can be loaded only into adapters that have values already. So give them initial values here, which the
        # caller replaces
        fill_lora(model, settings, seed=0, device=CPU)
        # An adapter that was trained on a base in 4 bits fits only these values of the base
        put_in_four_bits(model, settings.four_bit_layers, torch.float32)
    return PolicyModel(model, value_head=has_critic)


def _write_whole(policy: PolicyModel, target: Path, source: str, dtype_name: str) -> None:
    """Write a whole model, with adapters added to its weights."""
    dtype = torch_dtype(dtype_name)
    state = {name: tensor.to(dtype, copy=True) for name, tensor in named_full_tensors(policy)}
    write_model(
        policy.model, state, value_head_tensors(policy), target, source=model_folder(source), dtype=dtype
    )
