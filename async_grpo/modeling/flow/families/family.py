"""`FlowFamily`: how this library uses the pipelines of one class of diffusers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from async_grpo.modeling.flow.families.latents import PATCH, Config, Velocity, shift
from async_grpo.modeling.flow.prompt_inputs import Condition, PromptInputs
from async_grpo.options.fields import refuse

CANARY_TEXT_TOKENS = 8
# Maximum number of blocks. A wrong number in a configuration could otherwise occupy the machine before it is noticed
MAX_BLOCKS = 1000


class FlowFamily(ABC):
    """A class of pipelines of diffusers, with the methods in which the classes differ.

    In the methods, `config` is transformer/config.json and `vae_config` is vae/config.json ({} without a VAE).
    """

    pipeline_class: ClassVar[str]
    model_class: ClassVar[str]
    # Part of the pipeline -> classes that this part may have. A pipeline may lack the parts in `optional_parts`
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    optional_parts: ClassVar[tuple[str, ...]] = ()
    # Names of numbers in transformer/config.json that must be whole numbers above 0
    numbers: ClassVar[tuple[str, ...]] = (
        "in_channels",
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
    )
    reads_text: ClassVar[bool] = True

    @abstractmethod
    def latent_shape(self, config: Config, vae_config: Config, picture_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of the states that are denoised.

        Args:
            config: The model's configuration.
            vae_config: The VAE's configuration.
            picture_size: Height and width of the picture in pixels; 0 means the model's own.

        Raises:
            ConfigurationError: The model cannot draw this size.
        """

    def pixels_per_latent(self, vae_config: Config) -> int:
        """Return how many pixels one number of a state covers in height and in width, for an AutoencoderKL."""
        return int(2 ** (len(vae_config["block_out_channels"]) - 1))

    def picture_shape(self, config: Config, vae_config: Config, picture_size: int) -> tuple[int, int, int]:
        """Return colors, height and width of a picture."""
        scale = self.pixels_per_latent(vae_config)
        _, height, width = self.latent_shape(config, vae_config, picture_size)
        return 3, height * scale, width * scale

    def check(self, config: Config, file: Path) -> None:
        """Raise ConfigurationError if the configuration is not one that this family can train.

        Args:
            config: The model's configuration.
            file: Its file, for the message.
        """
        for name in self.numbers:
            value = config.get(name)
            refuse(
                type(value) is not int or value < 1, f"{file}: {name} is {value}, not a whole number above 0"
            )
        num_blocks = self.num_blocks(config)
        refuse(num_blocks > MAX_BLOCKS, f"{file}: {num_blocks} blocks, more than {MAX_BLOCKS}")
        refuse(bool(config.get("dropout")), f"{file}: dropout must be 0, or log-probs would not repeat")

    def num_tokens(self, latent_shape: tuple[int, int, int], config: Config) -> int:
        """Return the number of tokens of a picture in the transformer, for estimates of memory."""
        return (latent_shape[1] // PATCH) * (latent_shape[2] // PATCH)

    def num_blocks(self, config: Config) -> int:
        """Return the number of blocks of the transformer."""
        return int(config["num_layers"])

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return the blocks of the transformer that can each be an FSDP unit."""
        return list(model.transformer_blocks)

    def needs_negative(self, guidance: float) -> bool:
        """Return whether this guidance needs a second prediction of the model, for the negative prompt."""
        return guidance != 1

    def can_be_guided(self, config: Config) -> bool:
        """Return whether a guidance other than 1 changes what the model draws."""
        return True

    def times_arguments(self, num_steps: int, scheduler_config: Config, num_tokens: int) -> dict[str, Any]:
        """Return the arguments of the scheduler's `set_timesteps`, as the family's pipeline passes them.

        Args:
            num_steps: Number of denoising steps.
            scheduler_config: The scheduler's configuration.
            num_tokens: Number of tokens of a picture.
        """
        arguments: dict[str, Any] = {"sigmas": np.linspace(1.0, 1.0 / num_steps, num_steps).tolist()}
        if scheduler_config.get("use_dynamic_shifting"):
            arguments["mu"] = shift(num_tokens, scheduler_config)
        return arguments

    def predict(
        self,
        model: nn.Module,
        x: Velocity,
        timesteps: Float[Tensor, " steps"],
        prompts: PromptInputs,
        guidance: float,
    ) -> Velocity:
        """Return the velocity, guided by the negative prompts (classifier-free guidance, Ho and Salimans 2022).

        v = v_negative + guidance (v_prompt - v_negative)

        Args:
            model: The transformer.
            x: States before the denoising steps.
            timesteps: Times in the units of the scheduler, 0 to 1000.
            prompts: The prompts of the steps.
            guidance: 1 means no guidance.
        """
        if not self.needs_negative(guidance):
            return self._velocity(model, x, timesteps, prompts, guidance)
        doubled_velocity = self._velocity(
            model,
            torch.cat([x, x]),
            torch.cat([timesteps, timesteps]),
            self._with_negative(prompts),
            guidance,
        )
        velocity, negative_velocity = doubled_velocity.chunk(2)
        return self._rescaled(negative_velocity + guidance * (velocity - negative_velocity), velocity)

    def _with_negative(self, prompts: PromptInputs) -> PromptInputs:
        """Return the inputs of the prompts, followed by those of the negative prompts."""
        assert prompts.text is not None and prompts.negative is not None
        return PromptInputs(
            torch.cat([prompts.labels, prompts.labels]), prompts.text.followed_by(prompts.negative)
        )

    def _rescaled(self, guided: Velocity, velocity: Velocity) -> Velocity:
        """Return the guided velocity, rescaled if the family's pipeline rescales it."""
        return guided

    @abstractmethod
    def _velocity(
        self,
        model: Any,
        x: Velocity,
        timesteps: Float[Tensor, " steps"],
        prompts: PromptInputs,
        guidance: float,
    ) -> Velocity:
        """Return the velocity that the model predicts in one forward pass, without the negative prompt."""

    def encode(self, pipeline: Any, text: str, *, is_guided: bool) -> Condition:
        """Return the condition of a text, computed by the pipeline's text encoders.

        Args:
            pipeline: The pipeline of diffusers.
            text: The prompt.
            is_guided: Whether the condition includes the negative prompt.
        """
        raise NotImplementedError

    def random_condition(self, config: Config, random: np.random.Generator, *, is_guided: bool) -> Condition:
        """Return a random condition, with which the canary compares trainer and engine; () if prompts are labels."""
        shapes = [
            (CANARY_TEXT_TOKENS, int(config["joint_attention_dim"])),
            (int(config.get("pooled_projection_dim") or 0),),
        ]
        if is_guided:
            shapes *= 2
        return tuple(random.standard_normal(shape).astype(np.float32) for shape in shapes)

    def decode(self, vae: Any, states: Velocity) -> Float[Tensor, "pictures rgb pixels_y pixels_x"]:
        """Return pictures with values from -1 to 1, decoded from states after the last step."""
        config = vae.config
        return vae.decode(states / config.scaling_factor + config.shift_factor, return_dict=False)[0]
