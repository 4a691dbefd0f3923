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
ROUNDING = 1e-6  # by which a time of 1 may be larger
INSTALL = "diffusers is not installed: pip install 'async-grpo[draw]'"
# Errors that diffusers and torch raise for files with arbitrary contents
UNUSABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, NotImplementedError)


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
        try:
            scheduler = _diffusers().FlowMatchEulerDiscreteScheduler.from_config(dict(self.scheduler_config))
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
        try:
            return _diffusers().DiTTransformer2DModel.from_pretrained(
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
        try:
            with torch.device("meta"):
                return _diffusers().DiTTransformer2DModel.from_config(dict(self.model_config))
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
        bool([part for part in index.get("vae") or [] if part is not None]),
        f"{folder} has a vae, which is not supported yet: the model must draw pixels",
    )
    flow_folder = FlowFolder(
        path=folder,
        labels=_labels(index, folder),
        model_config=_read(folder / TRANSFORMER / "config.json"),
        scheduler_config=_read(folder / SCHEDULER / SCHEDULER_FILE),
    )
    _check_model_config(flow_folder)
    return flow_folder


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, follow_links=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    refuse(not isinstance(content, dict), f"{path} holds no JSON object")
    return dict(content)


def _labels(index: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Return the number of each label. A folder that names none has the labels "0", "1" and so on, without a mapping."""
    names = index.get("id2label")
    if names is None:
        return {}
    is_mapping = isinstance(names, dict) and 0 < len(names) <= MAX_LABELS
    refuse(
        not is_mapping or not all(key.isdecimal() and isinstance(name, str) for key, name in names.items()),
        f"{folder / INDEX_FILE}: id2label must map numbers to texts, at most {MAX_LABELS}",
    )
    return {name: int(key) for key, name in names.items()}


def _check_model_config(folder: FlowFolder) -> None:
    """Refuse a configuration whose model does not predict one velocity per number of the picture."""
    config = folder.model_config
    config_file = folder.path / TRANSFORMER / "config.json"
    for name in ("in_channels", "sample_size", "num_embeds_ada_norm", "patch_size"):
        value = config.get(name)
        refuse(
            type(value) is not int or value < 1,
            f"{config_file}: {name} is {value}, not a whole number above 0",
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


def _refuse_other_weights(folder: Path, empty_model: Any) -> None:
    """Raise ConfigurationError if the files lack a weight, or one has another shape than the configuration says."""
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
