"""Read a flow-matching model from a folder in the format of diffusers, without network access.

    model_index.json                 the class of the pipeline and of its parts, and the names of the labels
    transformer/config.json          the model that predicts the velocity
    transformer/*.safetensors        its weights
    scheduler/scheduler_config.json  the times of the denoising steps

diffusers provides the model and the scheduler (extra `draw`). The weights are read from safetensors files alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_grpo.algorithm.flow.windows import MAX_DENOISING_STEPS
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.flow.schedule import FlowSchedule
from async_grpo.modeling.model_files import refuse_more_parameters, weight_shapes
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import read_json

INDEX_FILE = "model_index.json"
TRANSFORMER = "transformer"
SCHEDULER = "scheduler"
SCHEDULER_FILE = "scheduler_config.json"
# The pipelines that can be trained, each with the classes of its model and of its scheduler
KNOWN_PIPELINES = {"DiTPipeline": ("DiTTransformer2DModel", "FlowMatchEulerDiscreteScheduler")}
MAX_LABELS = 100_000
MAX_LABEL_DIGITS = 6  # digits of the number of a label
# Largest values of a configuration. Without them, a wrong number could occupy the machine before it is noticed
MAX_BLOCKS = 1000
MAX_PICTURE_SIZE = 1024  # height and width, in pixels
MAX_SCHEDULER_TIMES = 1_000_000
ROUNDING = 1e-6  # by which a time of 1 may be larger
INSTALL = "diffusers is not installed: pip install 'async-grpo[draw]'"
# Errors that diffusers and torch raise for files with arbitrary contents
UNUSABLE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class FlowFolder:
    """The description of a flow-matching model in a folder, without its weights."""

    path: Path
    labels: Mapping[str, int]  # name of a label -> its number, which the model is conditioned on
    model_config: Mapping[str, Any]  # transformer/config.json
    scheduler_config: Mapping[str, Any]

    @property
    def num_labels(self) -> int:
        """Return the number of labels."""
        return int(self.model_config["num_embeds_ada_norm"])

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of a picture."""
        size = int(self.model_config["sample_size"])
        return int(self.model_config["in_channels"]), size, size

    @property
    def fingerprint(self) -> str:
        """Return the sha256 (hex) of everything but the weights. A model and its exports have the same fingerprint."""
        description = {
            "labels": dict(self.labels),
            "model": _without_versions(self.model_config),
            "scheduler": _without_versions(self.scheduler_config),
        }
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

    def schedule(self, num_steps: int) -> FlowSchedule:
        """Return the times of `num_steps` denoising steps.

        The scheduler gets evenly spaced times from 1 to 1 / num_steps, and may shift them, as the pipelines of diffusers
        do for flow-matching models.

        Raises:
            ConfigurationError: diffusers is not installed, or cannot use the folder's scheduler.
        """
        refuse(
            not 1 <= num_steps <= MAX_DENOISING_STEPS,
            f"a picture is drawn in 1 to {MAX_DENOISING_STEPS} denoising steps, not {num_steps}: set "
            "--max-generation-tokens, such as 10 (and --eval-max-tokens for evaluations)",
        )
        scheduler_class = _diffusers().FlowMatchEulerDiscreteScheduler
        try:
            scheduler = scheduler_class.from_config(dict(self.scheduler_config))
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1.0 / num_steps, num_steps).tolist())
        except UNUSABLE as error:
            raise ConfigurationError(f"the scheduler in {self.path} cannot be used: {error}") from error
        sigmas = tuple(scheduler.sigmas.tolist())
        are_falling = all(later < earlier for earlier, later in pairwise(sigmas))
        refuse(
            not are_falling or sigmas[0] > 1 + ROUNDING or sigmas[-1] != 0,
            f"the scheduler in {self.path} has times that do not fall from 1 to 0: {sigmas[0]:g} to {sigmas[-1]:g}",
        )
        return FlowSchedule(sigmas, tuple(scheduler.timesteps.tolist()))

    def load_model(self) -> Any:
        """Return the model in float32 on the CPU.

        Raises:
            ConfigurationError: diffusers is not installed, or the weights are missing or do not fit the configuration.
        """
        folder = self.path / TRANSFORMER
        self.check_weights()
        model_class = _diffusers().DiTTransformer2DModel
        try:
            return model_class.from_pretrained(
                folder,
                use_safetensors=True,
                local_files_only=True,
                torch_dtype=torch.float32,
                low_cpu_mem_usage=False,
            )
        except UNUSABLE as error:
            raise ConfigurationError(f"the model in {folder} cannot be loaded: {error}") from error

    def check_weights(self) -> None:
        """Compare names and shapes of the weights in the files with the configuration.

        Raises:
            ConfigurationError: diffusers is not installed, or a weight is missing or has another shape.
        """
        _refuse_other_weights(self.path / TRANSFORMER, self.empty_model())

    def empty_model(self) -> Any:
        """Return the model on the "meta" device, where it takes no memory.

        Raises:
            ConfigurationError: diffusers is not installed, or cannot make a model of the configuration.
        """
        model_class = _diffusers().DiTTransformer2DModel
        try:
            with torch.device("meta"):
                return model_class.from_config(dict(self.model_config))
        except UNUSABLE as error:
            raise ConfigurationError(
                f"diffusers can make no model of {self.path / TRANSFORMER}: {error}"
            ) from error


def is_flow_folder(path: str | Path) -> bool:
    """Return whether a folder holds a pipeline of diffusers."""
    return (Path(path).expanduser() / INDEX_FILE).is_file()


def read_flow_folder(path: str | Path) -> FlowFolder:
    """Return the description of the model in a folder, after checking that this library can train it.

    Raises:
        ConfigurationError: The folder holds no pipeline of diffusers, one that is not known, or one with a part that is not
            supported.
    """
    folder = Path(path).expanduser()
    refuse(
        not is_flow_folder(folder),
        f"--policy flow: {path} is no folder of diffusers (it has no {INDEX_FILE}); scripts/create_flow_model.py makes one",
    )
    index = _read(folder / INDEX_FILE)
    name = str(index.get("_class_name"))
    pipelines = ", ".join(KNOWN_PIPELINES)
    refuse(name not in KNOWN_PIPELINES, f"{folder} holds a {name}; only these can be trained: {pipelines}")
    model_name, scheduler_name = KNOWN_PIPELINES[name]
    for part, expected in ((TRANSFORMER, model_name), (SCHEDULER, scheduler_name)):
        part_class = index.get(part)
        is_expected = isinstance(part_class, list) and part_class[-1:] == [expected]
        refuse(not is_expected, f"{folder / INDEX_FILE} says {part} {part_class}, not {expected}")
    refuse(
        index.get("vae") not in (None, [], [None, None]),
        f"{folder} has a vae, which is not supported yet: the model must draw pixels",
    )
    flow_folder = FlowFolder(
        path=folder,
        labels=_labels(index, folder),
        model_config=_read(folder / TRANSFORMER / "config.json"),
        scheduler_config=_read(folder / SCHEDULER / SCHEDULER_FILE),
    )
    _check_model_config(flow_folder)
    _check_scheduler_config(flow_folder)
    return flow_folder


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, follow_links=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    refuse(not isinstance(content, dict), f"{path} holds no JSON object")
    return dict(content)


def _labels(index: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Return the number of each label. A folder that names none has the labels "0", "1" and so on, without a mapping.

    Raises:
        ConfigurationError: The names are no mapping, or a name or number occurs twice, so that a prompt could draw another
            label than it names.
    """
    names = index.get("id2label")
    if names is None:
        return {}
    file = folder / INDEX_FILE
    is_mapping = isinstance(names, dict) and 0 < len(names) <= MAX_LABELS
    refuse(
        not is_mapping or not all(_is_label(key, name) for key, name in names.items()),
        f"{file}: id2label must map numbers to texts, at most {MAX_LABELS}",
    )
    labels: dict[str, int] = {}
    for key, text in names.items():
        name = text.strip()
        refuse(name in labels, f"{file}: id2label has the name {name[:80]!r} twice")
        labels[name] = int(key)
    refuse(len(set(labels.values())) < len(labels), f"{file}: id2label has a number twice")
    return labels


def _is_label(key: str, name: Any) -> bool:
    return key.isdecimal() and len(key) <= MAX_LABEL_DIGITS and isinstance(name, str)


def _check_model_config(folder: FlowFolder) -> None:
    """Refuse a configuration whose model does not predict one velocity per number of the picture."""
    config = folder.model_config
    config_file = folder.path / TRANSFORMER / "config.json"
    for name in (
        "in_channels",
        "sample_size",
        "num_embeds_ada_norm",
        "patch_size",
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
    ):
        value = config.get(name)
        refuse(
            type(value) is not int or value < 1,
            f"{config_file}: {name} is {value}, not a whole number above 0",
        )
    size = config["sample_size"]
    refuse(
        size > MAX_PICTURE_SIZE, f"{config_file}: sample_size is {size}, more than {MAX_PICTURE_SIZE} pixels"
    )
    refuse(
        size % config["patch_size"] != 0,
        f"{config_file}: sample_size {size} is no multiple of patch_size {config['patch_size']}",
    )
    refuse(
        config["num_layers"] > MAX_BLOCKS,
        f"{config_file}: num_layers is {config['num_layers']}, more than {MAX_BLOCKS}",
    )
    refuse(
        folder.latent_shape[0] not in (1, 3),
        f"{config_file}: in_channels is {config['in_channels']}; pictures have 1 channel (gray) or 3 (RGB)",
    )
    out_channels = config.get("out_channels") or config["in_channels"]
    refuse(
        out_channels != config["in_channels"],
        f"{config_file}: out_channels is {out_channels}, but the velocity has {config['in_channels']} channels",
    )
    refuse(bool(config.get("dropout")), f"{config_file}: dropout must be 0, or log-probs would not repeat")
    highest = max(folder.labels.values(), default=0)
    refuse(
        highest >= folder.num_labels,
        f"{folder.path / INDEX_FILE}: label {highest} is outside the model's {folder.num_labels} labels",
    )


def _check_scheduler_config(folder: FlowFolder) -> None:
    """Refuse a number of training times for which the scheduler would need too much memory."""
    num_times = folder.scheduler_config.get("num_train_timesteps", 1)
    refuse(
        type(num_times) is not int or not 1 <= num_times <= MAX_SCHEDULER_TIMES,
        f"{folder.path / SCHEDULER / SCHEDULER_FILE}: num_train_timesteps is {num_times}, not a whole number from 1 to "
        f"{MAX_SCHEDULER_TIMES:,}",
    )


def _refuse_other_weights(folder: Path, empty_model: Any) -> None:
    """Raise ConfigurationError if the files do not have exactly the weights of the configuration, in these shapes."""
    shapes = weight_shapes(folder)
    refuse(
        not shapes,
        f"{folder} holds no weights in safetensors (diffusion_pytorch_model.safetensors); other formats are not read",
    )
    parameters = dict(empty_model.named_parameters())
    refuse_more_parameters(folder, sum(parameter.numel() for parameter in parameters.values()))
    for name, parameter in parameters.items():
        expected = list(parameter.shape)
        refuse(
            shapes.get(name) != expected,
            f"{folder}: {name} has the shape {shapes.get(name)} in the files, but {expected} by config.json",
        )
    # A buffer may be in the files, too. Any other weight would be ignored, such as the last block of a model whose
    # configuration has a block less
    buffers = dict(empty_model.named_buffers())
    surplus = sorted(set(shapes) - parameters.keys() - buffers.keys())
    refuse(
        bool(surplus),
        f"{folder}: the files have {len(surplus)} weights that config.json does not describe, such as {surplus[:1]}",
    )


def _diffusers() -> Any:
    """Return the package diffusers, or raise ConfigurationError if it is not installed."""
    try:
        import diffusers
    except ImportError as error:
        raise ConfigurationError(f"{INSTALL} ({error})") from error
    return diffusers


def _without_versions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys in which diffusers notes its class and version, and the folder."""
    return {key: value for key, value in config.items() if not key.startswith("_")}
