"""Tiny random folders of Stable Diffusion 3, FLUX and Qwen-Image: the real classes, with text encoders and a VAE."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers

NUM_STEPS = 4
NOISE_LEVEL = 0.7
TEXT_TOKENS = 16  # longest prompt of the CLIP encoders
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def clip_tokenizer() -> Any:
    """Return a tokenizer with one token per byte, and one per byte that ends a word."""
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{character}</w>" for character in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=TEXT_TOKENS)


def clip_encoder(tokenizer: Any, *, is_projected: bool) -> torch.nn.Module:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=TEXT_TOKENS,
        projection_dim=8,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **ENCODER,
    )
    return CLIPTextModelWithProjection(config) if is_projected else CLIPTextModel(config)


def t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    characters = [chr(number) for number in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(
        vocab=[*pieces, *((character, -3.0) for character in characters)], extra_ids=0, model_max_length=64
    )


def t5_encoder(tokenizer: Any) -> torch.nn.Module:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0
    )
    return T5EncoderModel(config)


def image_vae() -> torch.nn.Module:
    """Return a VAE whose latents have half the height and width of a picture."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=1.3,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def stable_diffusion_3() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    clip = clip_tokenizer()
    t5 = t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(),
        text_encoder=clip_encoder(clip, is_projected=True),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip, is_projected=True),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )


def flux(guidance_embeds: bool = True) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    clip = clip_tokenizer()
    t5 = t5_tokenizer()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=guidance_embeds,
    )
    return FluxPipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=image_vae(),
        text_encoder=clip_encoder(clip, is_projected=False),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
    )


def qwen_image() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Qwen2Tokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text_config = {**ENCODER, "num_key_value_heads": 2, "vocab_size": len(tokens), "rope_parameters": rope}
    vision_config = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "fullatt_block_indexes": [0],
    }
    encoder_config = Qwen2_5_VLConfig(text_config=text_config, vision_config=vision_config)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.1, -0.2, 0.0, 0.3],
        latents_std=[1.1, 0.9, 1.3, 1.0],
    )
    return QwenImagePipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(encoder_config),
        tokenizer=tokenizer,
    )


PIPELINES: dict[str, Callable[[], Any]] = {
    "stable_diffusion_3": stable_diffusion_3,
    "flux": flux,
    "qwen_image": qwen_image,
}
PICTURE_SIZE = 16  # height and width of the pictures that the tests draw, in pixels


def save_tiny_pipeline(name: str, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write the folder. The transformer's weights are large, so that text, times and states all change the velocity."""
    torch.manual_seed(seed)
    pipeline = PIPELINES[name](**options)
    with torch.no_grad():
        for parameter in pipeline.transformer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    pipeline.save_pretrained(folder)
    return folder
