"""`StableDiffusion3Family`: models with the pipeline of Stable Diffusion 3 and 3.5."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from async_grpo.modeling.flow.families.family import FlowFamily
from async_grpo.modeling.flow.families.latents import (
    CLIP_TOKENIZERS,
    PATCH,
    T5_TOKENIZERS,
    Config,
    Velocity,
    as_arrays,
    latent_size,
    shift,
    text_inputs_of,
)
from async_grpo.modeling.flow.prompt_inputs import Condition, PromptInputs
from async_grpo.options.fields import refuse


class StableDiffusion3Family(FlowFamily):
    """Models with the pipeline of Stable Diffusion 3 and 3.5."""

    pipeline_class = "StableDiffusion3Pipeline"
    model_class = "SD3Transformer2DModel"
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("AutoencoderKL",),
        "text_encoder": ("CLIPTextModelWithProjection",),
        "text_encoder_2": ("CLIPTextModelWithProjection",),
        "text_encoder_3": ("T5EncoderModel",),
        "tokenizer": CLIP_TOKENIZERS,
        "tokenizer_2": CLIP_TOKENIZERS,
        "tokenizer_3": T5_TOKENIZERS,
    }
    optional_parts = ("text_encoder_3", "tokenizer_3")
    numbers = (
        *FlowFamily.numbers,
        "sample_size",
        "patch_size",
        "joint_attention_dim",
        "pooled_projection_dim",
        "pos_embed_max_size",
    )

    def latent_shape(self, config: Config, vae_config: Config, picture_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of the latents. Too large pictures are refused."""
        scale = self.pixels_per_latent(vae_config)
        patch = int(config["patch_size"])
        size = latent_size(picture_size or int(config["sample_size"]) * scale, scale, patch)
        largest = int(config["pos_embed_max_size"]) * patch
        refuse(
            size > largest,
            f"--picture-size: this model draws at most {largest * scale} x {largest * scale} pixels",
        )
        return int(config["in_channels"]), size, size

    def num_tokens(self, latent_shape: tuple[int, int, int], config: Config) -> int:
        """Return the number of patches of a picture's latents, each of which is a token of the transformer."""
        return (latent_shape[1] // int(config.get("patch_size", PATCH))) ** 2

    def times_arguments(self, num_steps: int, scheduler_config: Config, num_tokens: int) -> dict[str, Any]:
        """Return the number of steps, from which the scheduler computes the times itself, and its shift if it uses one."""
        arguments: dict[str, Any] = {"num_inference_steps": num_steps}
        if scheduler_config.get("use_dynamic_shifting"):
            arguments["mu"] = shift(num_tokens, scheduler_config, max_shift=1.16)
        return arguments

    def _velocity(
        self,
        model: Any,
        x: Velocity,
        timesteps: Float[Tensor, " steps"],
        prompts: PromptInputs,
        guidance: float,
    ) -> Velocity:
        text = text_inputs_of(prompts)
        return model(
            hidden_states=x,
            timestep=timesteps,
            encoder_hidden_states=text.embeddings,
            pooled_projections=text.pooled,
            return_dict=False,
        )[0]

    def encode(self, pipeline: Any, text: str, *, is_guided: bool) -> Condition:
        """Return the embeddings of a text, followed by those of the negative prompt if the model is guided.

        The negative prompt is the empty text, as in the pipeline.
        """
        embeddings, negative, pooled, negative_pooled = pipeline.encode_prompt(
            text, None, None, do_classifier_free_guidance=is_guided
        )
        tensors = [embeddings, pooled]
        if is_guided:
            tensors += [negative, negative_pooled]
        return as_arrays(*tensors)
