"""`FluxFamily`: models with the pipeline of FLUX.1."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from async_grpo.modeling.flow.families.family import Config, FlowFamily, Velocity
from async_grpo.modeling.flow.families.latents import (
    CLIP_TOKENIZERS,
    PATCH,
    T5_TOKENIZERS,
    as_arrays,
    packed,
    packed_shape,
    patch_positions,
    text_inputs_of,
    unpacked,
    vae_scale,
)
from async_grpo.modeling.flow.prompt_inputs import Condition, PromptInputs


class FluxFamily(FlowFamily):
    """Models with the pipeline of FLUX.1."""

    pipeline_class = "FluxPipeline"
    model_class = "FluxTransformer2DModel"
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModel",),
        "text_encoder_2": ("T5EncoderModel",),
        "tokenizer": CLIP_TOKENIZERS,
        "tokenizer_2": T5_TOKENIZERS,
    }
    numbers = (*FlowFamily.numbers, "joint_attention_dim", "pooled_projection_dim", "num_single_layers")

    def pixels_per_latent(self, vae_config: Config) -> int:
        """Return how many pixels one latent covers in height and in width, from the depth of the VAE."""
        return vae_scale(vae_config)

    def latent_shape(self, config: Config, vae_config: Config, picture_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of the latents."""
        return packed_shape(config, vae_scale(vae_config), picture_size)

    def num_blocks(self, config: Config) -> int:
        """Return the number of blocks of both kinds: with separate streams for text and picture, and with one stream."""
        return int(config["num_layers"]) + int(config["num_single_layers"])

    def blocks(self, model: Any) -> list[nn.Module]:
        """Return the blocks of both kinds, each of which can be an FSDP unit."""
        return [*model.transformer_blocks, *model.single_transformer_blocks]

    def needs_negative(self, guidance: float) -> bool:
        """Return False, because the model gets the guidance as a number and needs no negative prompt."""
        return False

    def can_be_guided(self, config: Config) -> bool:
        """Return whether the model has an input for the guidance. FLUX.1-schnell has none."""
        return bool(config.get("guidance_embeds"))

    def _velocity(
        self,
        model: Any,
        x: Velocity,
        timesteps: Float[Tensor, " steps"],
        prompts: PromptInputs,
        guidance: float,
    ) -> Velocity:
        text = text_inputs_of(prompts)
        height = x.shape[2] // PATCH
        width = x.shape[3] // PATCH
        guidances = None
        if model.config.guidance_embeds:
            guidances = torch.full_like(timesteps, guidance)
        packed_velocity = model(
            hidden_states=packed(x),
            timestep=timesteps / 1000,
            guidance=guidances,
            encoder_hidden_states=text.embeddings,
            pooled_projections=text.pooled,
            txt_ids=torch.zeros(text.embeddings.shape[1], 3, device=x.device, dtype=x.dtype),
            img_ids=patch_positions(height, width, x),
            return_dict=False,
        )[0]
        return unpacked(packed_velocity, height, width)

    def encode(self, pipeline: Any, text: str, *, is_guided: bool) -> Condition:
        """Return the embeddings of a text and its pooled embeddings."""
        embeddings, pooled, _ = pipeline.encode_prompt(text, None)
        return as_arrays(embeddings, pooled)
