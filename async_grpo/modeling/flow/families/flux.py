"""`FluxFamily`: models with the pipeline of FLUX.1."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from async_grpo.modeling.flow.families.latents import (
    CLIP_TOKENIZERS,
    T5_TOKENIZERS,
    Config,
    as_arrays,
    patch_positions,
)
from async_grpo.modeling.flow.families.packed import PackedFamily, Tokens
from async_grpo.modeling.flow.prompt_inputs import Condition, TextInputs


class FluxFamily(PackedFamily):
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
    numbers = (*PackedFamily.numbers, "joint_attention_dim", "pooled_projection_dim", "num_single_layers")

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

    def _packed_velocity(
        self,
        model: Any,
        tokens: Tokens,
        size: tuple[int, int],
        times: Float[Tensor, " steps"],
        text: TextInputs,
        guidance: float,
    ) -> Tokens:
        guidances = None
        if model.config.guidance_embeds:
            guidances = torch.full_like(times, guidance)
        return model(
            hidden_states=tokens,
            timestep=times,
            guidance=guidances,
            encoder_hidden_states=text.embeddings,
            pooled_projections=text.pooled,
            txt_ids=tokens.new_zeros(text.embeddings.shape[1], 3),
            img_ids=patch_positions(*size, like=tokens),
            return_dict=False,
        )[0]

    def encode(self, pipeline: Any, text: str, *, is_guided: bool) -> Condition:
        """Return the embeddings of a text and its pooled embeddings."""
        embeddings, pooled, _ = pipeline.encode_prompt(text, None)
        return as_arrays(embeddings, pooled)
