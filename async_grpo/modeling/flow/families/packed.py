"""`PackedFamily`: models that read each patch of 2 x 2 latents as one token, as FLUX and Qwen-Image do."""

from abc import abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor

from async_grpo.modeling.flow.families.family import FlowFamily
from async_grpo.modeling.flow.families.latents import (
    PATCH,
    Config,
    Velocity,
    latent_size,
    packed,
    text_inputs_of,
    unpacked,
)
from async_grpo.modeling.flow.prompt_inputs import PromptInputs, TextInputs

Tokens = Float[Tensor, "steps tokens packed_channels"]
# Height and width of the latents that the pipelines of diffusers draw unless told otherwise
DEFAULT_LATENT_SIZE = 128
TIMES_PER_UNIT = 1000  # the models read times from 0 to 1, and the scheduler counts them from 0 to 1000


class PackedFamily(FlowFamily):
    """A class of pipelines whose model reads each patch of latents as one token."""

    def latent_shape(self, config: Config, vae_config: Config, picture_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of the latents. A patch of them has `in_channels` numbers."""
        scale = self.pixels_per_latent(vae_config)
        size = latent_size(picture_size or DEFAULT_LATENT_SIZE * scale, scale, PATCH)
        return int(config["in_channels"]) // PATCH**2, size, size

    def _velocity(
        self,
        model: Any,
        x: Velocity,
        timesteps: Float[Tensor, " steps"],
        prompts: PromptInputs,
        guidance: float,
    ) -> Velocity:
        height = x.shape[2] // PATCH
        width = x.shape[3] // PATCH
        packed_velocity = self._packed_velocity(
            model,
            packed(x),
            (height, width),
            timesteps / TIMES_PER_UNIT,
            text_inputs_of(prompts),
            guidance,
        )
        return unpacked(packed_velocity, height, width)

    @abstractmethod
    def _packed_velocity(
        self,
        model: Any,
        tokens: Tokens,
        size: tuple[int, int],
        times: Float[Tensor, " steps"],
        text: TextInputs,
        guidance: float,
    ) -> Tokens:
        """Return the packed velocity that the model predicts in one forward pass.

        Args:
            model: The transformer.
            tokens: The packed states before the denoising steps.
            size: Height and width of the states in patches.
            times: Times of the steps, from 0 to 1.
            text: The prompts of the steps.
            guidance: 1 means no guidance.
        """
