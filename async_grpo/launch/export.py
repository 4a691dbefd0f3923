"""`async-grpo export`: write the model of a checkpoint in the Hugging Face format."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.options.fields import Section, option, refuse, required
from async_grpo.training.checkpoint_folder import Manifest, named

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Section):
    """Options of `async-grpo export`."""

    path: str = required(
        "Folder of a checkpoint, or of a run (its newest checkpoint).", "Export", argument=True
    )
    output_dir: str = required("Folder of the exported model, which must not exist.", "Export")
    dtype: str = option(
        "bfloat16", "Data type of the exported weights.", "Export", choices=("float32", "bfloat16")
    )


def export(config: ExportConfig) -> Manifest:
    """Write the model of a checkpoint, and return the checkpoint's manifest.

    Raises:
        ConfigurationError: There is no complete checkpoint, or the output folder exists or cannot be made.
        RunFailed: The model cannot be written, for example because the disk is full.
        CheckpointBroken: The checkpoint's weights are not those that its manifest describes.
    """
    target = Path(config.output_dir)
    refuse(os.path.exists(target), f"--output-dir {target} exists: choose another folder")
    folder, manifest = named(Path(config.path))
    source = manifest.options.get("model_name_or_path")
    if not isinstance(source, str) or "\0" in source:
        raise ConfigurationError(
            f"{folder} does not say of which model it is (model_name_or_path in its manifest)"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--output-dir {target} cannot be made: {error.strerror}: choose another folder"
        ) from error
    # These imports take seconds, so wrong options are refused before them
    from safetensors import SafetensorError

    from async_grpo.modeling.load import load_causal_lm, model_folder, torch_dtype
    from async_grpo.modeling.policy import PolicyModel, named_full_tensors, value_head_tensors
    from async_grpo.training.checkpoint import load_weights
    from async_grpo.training.export import write_model

    dtype = torch_dtype(config.dtype)
    has_critic = manifest.options.get("advantage_estimator") == "gae"
    policy = PolicyModel(load_causal_lm(source, "float32"), value_head=has_critic)
    load_weights(policy, folder)
    state = {name: tensor.to(dtype, copy=True) for name, tensor in named_full_tensors(policy)}
    try:
        write_model(
            policy.model,
            state,
            value_head_tensors(policy),
            target,
            source=model_folder(source),
            dtype=dtype,
        )
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"--output-dir {target} cannot be written: {error}: choose another folder") from error
    log.info("the model after step %d, trained on %d samples: %s", manifest.step, manifest.samples, target)
    return manifest
