"""`LabelFamily`: class-conditional models, which draw a picture of a given label."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from async_grpo.modeling.flow.families.family import FlowFamily
from async_grpo.modeling.flow.families.latents import Config, Velocity
from async_grpo.modeling.flow.prompt_inputs import Condition, PromptInputs
from async_grpo.options.fields import refuse

MAX_PICTURE_SIZE = 1024  # height and width, in pixels
DROPPED_LABEL = -1  # label for the embedding of "no label", which serves as the negative prompt of guidance


class LabelFamily(FlowFamily):
    """A class-conditional DiT that draws pixels, without a VAE."""

    pipeline_class = "DiTPipeline"
    model_class = "DiTTransformer2DModel"
    numbers = (*FlowFamily.numbers, "sample_size", "num_embeds_ada_norm", "patch_size")
    reads_text = False

    def latent_shape(self, config: Config, vae_config: Config, picture_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of a picture. The model draws only the size in its configuration."""
        size = int(config["sample_size"])
        refuse(
            picture_size not in (0, size),
            f"--picture-size {picture_size}: this model draws pictures of {size} x {size} pixels; leave the option out",
        )
        return int(config["in_channels"]), size, size

    def pixels_per_latent(self, vae_config: Config) -> int:
        """Return 1, because the states are pixels."""
        return 1

    def picture_shape(self, config: Config, vae_config: Config, picture_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of a picture. They are those of a state, because the model draws pixels."""
        return self.latent_shape(config, vae_config, picture_size)

    def check(self, config: Config, file: Path) -> None:
        """Raise ConfigurationError if the sizes or channels in the configuration do not fit a model that draws pixels."""
        super().check(config, file)
        size = config["sample_size"]
        refuse(size > MAX_PICTURE_SIZE, f"{file}: sample_size is {size}, more than {MAX_PICTURE_SIZE} pixels")
        refuse(
            size % config["patch_size"] != 0,
            f"{file}: sample_size {size} is no multiple of patch_size {config['patch_size']}",
        )
        in_channels = config["in_channels"]
        refuse(
            in_channels not in (1, 3),
            f"{file}: in_channels is {in_channels}; pictures have 1 channel (gray) or 3 (RGB)",
        )
        out_channels = config.get("out_channels") or in_channels
        refuse(
            out_channels != in_channels,
            f"{file}: out_channels is {out_channels}, but the velocity has {in_channels} channels",
        )

    def num_tokens(self, latent_shape: tuple[int, int, int], config: Config) -> int:
        """Return the number of patches of a picture, each of which is a token of the transformer."""
        return (latent_shape[1] // int(config.get("patch_size", 1))) ** 2

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return all blocks but the first, for FSDP units.

        The embedding of times and labels is inside the first block, and the model calls it again after all blocks. If
        the first block were a unit, its weights would then already be sharded again.
        """
        return list(model.transformer_blocks)[1:]

    def times_arguments(self, num_steps: int, scheduler_config: Config, num_tokens: int) -> dict[str, Any]:
        """Return evenly spaced times, which the scheduler may shift."""
        return {"sigmas": np.linspace(1.0, 1.0 / num_steps, num_steps).tolist()}

    def _with_negative(self, prompts: PromptInputs) -> PromptInputs:
        return PromptInputs(torch.cat([prompts.labels, torch.full_like(prompts.labels, DROPPED_LABEL)]))

    def _velocity(
        self,
        model: Any,
        x: Velocity,
        timesteps: Float[Tensor, " steps"],
        prompts: PromptInputs,
        guidance: float,
    ) -> Velocity:
        num_labels = model.config.num_embeds_ada_norm
        labels = torch.where(prompts.labels == DROPPED_LABEL, num_labels, prompts.labels)
        return model(hidden_states=x, timestep=timesteps, class_labels=labels, return_dict=False)[0]

    def random_condition(self, config: Config, random: np.random.Generator, *, is_guided: bool) -> Condition:
        """Return (), because a prompt is only a label."""
        return ()

    def decode(self, vae: Any, states: Velocity) -> Float[Tensor, "pictures rgb pixels_y pixels_x"]:
        """Return the states unchanged, because they are pixels."""
        return states
