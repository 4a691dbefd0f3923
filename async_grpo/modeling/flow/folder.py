"""Read a flow-matching model from a folder in the format of diffusers, without network access.

    model_index.json                 the class of the pipeline and of its parts, and the names of the labels
    transformer/config.json          the model that predicts the velocity
    transformer/*.safetensors        its weights
    scheduler/scheduler_config.json  the times of the denoising steps
    vae/, text_encoder/, ...         further parts of a model that reads texts, which only engines load

diffusers provides the model and the scheduler (extra `draw`). The weights are read from safetensors files alone.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch

from async_grpo.algorithm.flow.windows import MAX_DENOISING_STEPS
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.flow.families import FAMILIES
from async_grpo.modeling.flow.families.family import FlowFamily
from async_grpo.modeling.flow.pipeline_index import (
    INDEX_FILE,
    SCHEDULER,
    SCHEDULER_CLASS,
    TRANSFORMER,
    VAE,
    labels_of,
    part_classes_of,
)
from async_grpo.modeling.flow.schedule import FlowSchedule
from async_grpo.modeling.model_files import check_model_folder, refuse_more_parameters, weight_shapes
from async_grpo.options.fields import refuse
from async_grpo.processes.untrusted_files import read_json

SCHEDULER_FILE = "scheduler_config.json"
NUM_BYTES = 256  # number of values of a byte; a text prompt is a list of bytes
MAX_SCHEDULER_TIMES = 1_000_000
MAX_LATENT_SIZE = 1024  # height and width of the states that are denoised
ROUNDING = 1e-6  # the first time of a schedule may exceed 1 by this much
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
    """A flow-matching model in a folder: its configuration, without its weights."""

    path: Path
    family: FlowFamily
    # Name of a label -> the number by which the model knows it; {} if the model reads texts
    labels: Mapping[str, int]
    model_config: Mapping[str, Any]  # transformer/config.json
    scheduler_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]  # vae/config.json; {} without a VAE
    # Part of the pipeline -> its class; the transformer and the scheduler are left out
    part_classes: Mapping[str, str]
    picture_size: int = 0  # height and width in pixels; 0 means the model's own

    @property
    def num_labels(self) -> int:
        """Return the number of labels. If the model reads texts, return 256, the number of values of a byte."""
        return NUM_BYTES if self.family.reads_text else int(self.model_config["num_embeds_ada_norm"])

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Return channels, height and width of the states that are denoised.

        Raises:
            ConfigurationError: The model cannot draw pictures of this size.
        """
        return self.family.latent_shape(self.model_config, self.vae_config, self.picture_size)

    @property
    def picture_shape(self) -> tuple[int, int, int]:
        """Return colors, height and width of a picture."""
        return self.family.picture_shape(self.model_config, self.vae_config, self.picture_size)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of a picture in the transformer."""
        return self.family.num_tokens(self.latent_shape, self.model_config)

    def with_options(self, picture_size: int, guidance: float) -> Self:
        """Return the description with another size of the pictures.

        Args:
            picture_size: Height and width in pixels; 0 means the model's own.
            guidance: Guidance of the run, which is checked.

        Raises:
            ConfigurationError: The model cannot draw this size, or cannot be guided so.
        """
        refuse(
            guidance != 1 and not self.family.can_be_guided(self.model_config),
            f"--guidance {guidance:g}: the model in {self.path} has no guidance (guidance_embeds is false): leave it "
            "out",
        )
        folder = replace(self, picture_size=picture_size)
        size = folder.latent_shape[1]
        refuse(size > MAX_LATENT_SIZE, f"--picture-size {picture_size} is too large: {size} x {size} latents")
        return folder

    @property
    def fingerprint(self) -> str:
        """Return the sha256 (hex) of the folder's labels, parts and configurations, without the versions in them.

        A model and its exports have the same fingerprint, because weights do not count.
        """
        description = {
            "labels": dict(self.labels),
            "model": _without_versions(self.model_config),
            "scheduler": _without_versions(self.scheduler_config),
        }
        if self.family.reads_text:
            description |= {"parts": dict(self.part_classes), "vae": _without_versions(self.vae_config)}
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

    def schedule(self, num_steps: int) -> FlowSchedule:
        """Return the times of `num_steps` denoising steps.

        The scheduler gets the arguments that the pipeline of diffusers would pass.

        Raises:
            ConfigurationError: diffusers is not installed, or cannot use the folder's scheduler.
        """
        refuse(
            not 1 <= num_steps <= MAX_DENOISING_STEPS,
            f"a picture is drawn in 1 to {MAX_DENOISING_STEPS} denoising steps, not {num_steps}: set "
            "--max-generation-tokens, such as 10 (and --eval-max-tokens for evaluations)",
        )
        scheduler_class = getattr(_diffusers(), SCHEDULER_CLASS)
        try:
            scheduler = scheduler_class.from_config(dict(self.scheduler_config))
            arguments = self.family.times_arguments(num_steps, self.scheduler_config, self.num_tokens)
            scheduler.set_timesteps(**arguments)
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
        model_class = getattr(_diffusers(), self.family.model_class)
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

    def load_pipeline(self, model: Any, encoder_dtype: torch.dtype) -> Any:
        """Return the pipeline with its text encoders and its VAE (float32) on the CPU, without gradients.

        Args:
            model: The transformer.
            encoder_dtype: Dtype of the text encoders. It need not be the trainer's, because only the engine computes
                embeddings, for the trainer as well.

        Raises:
            ConfigurationError: A part is missing or cannot be loaded.
        """
        pipeline_class = getattr(_diffusers(), self.family.pipeline_class)
        for part in self.part_classes:
            check_model_folder(self.path / part)
        try:
            pipeline = pipeline_class.from_pretrained(
                self.path,
                transformer=model,
                use_safetensors=True,
                local_files_only=True,
                torch_dtype={"default": encoder_dtype, "vae": torch.float32},
            )
        except UNUSABLE as error:
            raise ConfigurationError(f"the pipeline in {self.path} cannot be loaded: {error}") from error
        modules = [module for name, module in pipeline.components.items() if name in self.part_classes]
        for module in modules:
            if isinstance(module, torch.nn.Module):
                module.eval().requires_grad_(False)
        return pipeline

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
        model_class = getattr(_diffusers(), self.family.model_class)
        try:
            with torch.device("meta"):
                return model_class.from_config(dict(self.model_config))
        except UNUSABLE as error:
            raise ConfigurationError(
                f"diffusers can make no model of {self.path / TRANSFORMER}: {error}"
            ) from error


def is_flow_folder(path: str | Path) -> bool:
    """Return whether a folder contains a pipeline of diffusers."""
    return (Path(path).expanduser() / INDEX_FILE).is_file()


def read_flow_folder(path: str | Path) -> FlowFolder:
    """Return the description of the model in a folder, after checking that this library can train it.

    Raises:
        ConfigurationError: The folder contains no pipeline of diffusers, one that is not known, or one with a part that
            is not supported.
    """
    folder = Path(path).expanduser()
    refuse(
        not is_flow_folder(folder),
        f"--policy flow: {path} is no folder of diffusers (it has no {INDEX_FILE}); scripts/create_flow_model.py makes one",
    )
    index = _read(folder / INDEX_FILE)
    name = str(index.get("_class_name"))
    pipelines = ", ".join(FAMILIES)
    refuse(name not in FAMILIES, f"{folder} holds a {name}; only these can be trained: {pipelines}")
    family = FAMILIES[name]
    part_classes = part_classes_of(index, family, folder / INDEX_FILE)
    flow_folder = FlowFolder(
        path=folder,
        family=family,
        labels={} if family.reads_text else labels_of(index, folder / INDEX_FILE),
        model_config=_read(folder / TRANSFORMER / "config.json"),
        scheduler_config=_read(folder / SCHEDULER / SCHEDULER_FILE),
        vae_config=_read(folder / VAE / "config.json") if VAE in part_classes else {},
        part_classes=part_classes,
    )
    _check_configs(flow_folder)
    return flow_folder


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path, follow_links=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    refuse(not isinstance(content, dict), f"{path} holds no JSON object")
    return dict(content)


def _check_configs(folder: FlowFolder) -> None:
    """Refuse configurations whose model cannot be trained.

    The model must predict one velocity for each number of a state, and must not need too much memory.
    """
    folder.family.check(folder.model_config, folder.path / TRANSFORMER / "config.json")
    try:
        shape = folder.latent_shape
    except UNUSABLE as error:
        raise ConfigurationError(f"the VAE of {folder.path} cannot be used: {error}") from error
    refuse(
        not 1 <= shape[1] <= MAX_LATENT_SIZE,
        f"{folder.path}: the model denoises {shape[1]} x {shape[2]} numbers, more than {MAX_LATENT_SIZE}",
    )
    highest = max(folder.labels.values(), default=0)
    refuse(
        highest >= folder.num_labels,
        f"{folder.path / INDEX_FILE}: label {highest} is outside the model's {folder.num_labels} labels",
    )
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
    # The files may also contain buffers. Refuse all other surplus weights, because they would be ignored: for example,
    # the last block of a model whose configuration has a block too few
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
    """Return a configuration without the keys in which diffusers stores its class, its version and the folder."""
    return {key: value for key, value in config.items() if not key.startswith("_")}
