"""`async-grpo export`: write the model of a checkpoint in the Hugging Face format, or add a LoRA adapter to its base."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.options.fields import Section, option, refuse, required
from async_grpo.training.checkpoint_folder import named

ADAPTER_CONFIG_FILE = "adapter_config.json"  # a folder with this file is an adapter in peft's format
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportConfig(Section):
    """Options of `async-grpo export`."""

    path: str = required(
        "Folder of a checkpoint, of a run (its newest checkpoint), or of a LoRA adapter in peft's format.",
        "Export",
        argument=True,
    )
    output_dir: str = required("Folder of the exported model, which must not exist.", "Export")
    dtype: str = option(
        "bfloat16",
        "Data type of the exported weights. Adapters are always written in float32.",
        "Export",
        choices=("float32", "bfloat16"),
    )
    merged: bool = option(
        False,
        "Write a whole model: the base with the LoRA adapter added to its weights. Without this option, the checkpoint of "
        "a LoRA run is written as an adapter in peft's format.",
        "Export",
    )
    load_in_4bit: bool = option(
        False,
        "With --merged and the folder of an adapter: the adapter was trained with --load-in-4bit, so add it to the values "
        "that its base had in 4 bits. Checkpoints say it themselves.",
        "Export",
    )
    base: str = option(
        "", "Folder of the base model, if it is not where the run or the adapter had it.", "Export"
    )


def export(config: ExportConfig) -> int:
    """Write the model of a checkpoint or of an adapter, and return the step of the checkpoint (0 for an adapter).

    Raises:
        ConfigurationError: There is no complete checkpoint and no adapter, the base is not found, or the output folder
            exists or cannot be made.
        RunFailed: The model cannot be written, for example because the disk is full.
        CheckpointBroken: The checkpoint's weights are not those that its manifest describes.
    """
    target = Path(config.output_dir)
    refuse(
        config.load_in_4bit and not config.merged,
        "--load-in-4bit does nothing without --merged: leave it out",
    )
    refuse(os.path.exists(target), f"--output-dir {target} exists: choose another folder")
    path = Path(config.path)
    manifest = None
    if not (path / ADAPTER_CONFIG_FILE).is_file():
        folder, manifest = named(path)
        refuse(
            config.load_in_4bit and not manifest.lora.get("four_bit_layers"),
            f"--load-in-4bit: the base of {path} was not in 4 bits: leave it out",
        )
    elif not config.merged:
        raise ConfigurationError(f"{path} is an adapter already: give --merged to add it to its base")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--output-dir {target} cannot be made: {error.strerror}: choose another folder"
        ) from error
    # Import this here, because it takes seconds: wrong options should be refused before
    from safetensors import SafetensorError

    from async_grpo.launch.exported_models import export_adapter, export_checkpoint

    try:
        if manifest is None:
            export_adapter(path, target, config.base, config.dtype, in_4bit=config.load_in_4bit)
            log.info("the model with the adapter in %s: %s", path, target)
            return 0
        export_checkpoint(folder, manifest, target, config.base, config.dtype, merged=config.merged)
    except (OSError, SafetensorError) as error:
        raise RunFailed(f"--output-dir {target} cannot be written: {error}: choose another folder") from error
    log.info("the model after step %d, trained on %d samples: %s", manifest.step, manifest.samples, target)
    return manifest.step
