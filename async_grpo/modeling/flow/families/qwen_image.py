"""`QwenImageFamily`: models with the pipeline of Qwen-Image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from async_grpo.modeling.flow.families.latents import PATCH, Config, Velocity, as_arrays, packed, unpacked
from async_grpo.modeling.flow.families.packed import PackedFamily, Tokens
from async_grpo.modeling.flow.prompt_inputs import Condition, TextInputs
from async_grpo.options.fields import refuse


class QwenImageFamily(PackedFamily):
    """Models with the pipeline of Qwen-Image."""

    pipeline_class = "QwenImagePipeline"
    model_class = "QwenImageTransformer2DModel"
    parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "vae": ("AutoencoderKLQwenImage",),
        "text_encoder": ("Qwen2_5_VLForConditionalGeneration",),
        "tokenizer": ("Qwen2Tokenizer", "Qwen2TokenizerFast"),
    }
    numbers = (*PackedFamily.numbers, "joint_attention_dim")

    def pixels_per_latent(self, vae_config: Config) -> int:
        """Return how many pixels one latent covers in height and in width, from the depth of the VAE."""
        return int(2 ** len(vae_config["temperal_downsample"]))

    def check(self, config: Config, file: Path) -> None:
        """Raise ConfigurationError if the configuration has settings of other variants of Qwen-Image."""
        super().check(config, file)
        for name in ("guidance_embeds", "zero_cond_t", "use_additional_t_cond", "use_layer3d_rope"):
            refuse(bool(config.get(name)), f"{file}: {name} is set, which is not supported")

    def _rescaled(self, guided: Velocity, velocity: Velocity) -> Velocity:
        """Give each token of the guided velocity the norm of the velocity without guidance, as the pipeline does."""
        packed_guided = packed(guided)
        norms = packed(velocity).norm(dim=-1, keepdim=True)
        rescaled = packed_guided * (norms / packed_guided.norm(dim=-1, keepdim=True))
        return unpacked(rescaled, guided.shape[2] // PATCH, guided.shape[3] // PATCH)

    def _packed_velocity(
        self,
        model: Any,
        tokens: Tokens,
        size: tuple[int, int],
        times: Float[Tensor, " steps"],
        text: TextInputs,
        guidance: float,
    ) -> Tokens:
        return model(
            hidden_states=tokens,
            timestep=times,
            encoder_hidden_states=text.embeddings,
            encoder_hidden_states_mask=None if bool(text.mask.all()) else text.mask,
            img_shapes=[[(1, *size)]] * len(tokens),
            return_dict=False,
        )[0]

    def encode(self, pipeline: Any, text: str, *, is_guided: bool) -> Condition:
        """Return the embeddings of a text, followed by those of the negative prompt if the model is guided.

        The negative prompt is a space, because the text encoder needs at least one token.
        """
        texts = [text, " "] if is_guided else [text]
        arrays: list[np.ndarray] = []
        for prompt in texts:
            embeddings, _ = pipeline.encode_prompt(prompt, max_sequence_length=512)
            arrays += [*as_arrays(embeddings), np.zeros(0, np.float32)]
        return tuple(arrays)

    def decode(self, vae: Any, states: Velocity) -> Float[Tensor, "pictures rgb pixels_y pixels_x"]:
        """Return the pictures that the VAE decodes.

        It is a VAE of videos, so each picture is passed as a video of one frame.
        """
        mean = torch.tensor(vae.config.latents_mean, device=states.device)[:, None, None]
        std = torch.tensor(vae.config.latents_std, device=states.device)[:, None, None]
        frames = (states * std + mean)[:, :, None]
        return vae.decode(frames, return_dict=False)[0][:, :, 0]
