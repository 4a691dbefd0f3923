"""A tiny random model that reads images with its files, made without a network, and small pictures for its prompts."""

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
)

CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
# As in the folder of Qwen2.5-VL
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MIN_PIXELS = 56 * 56
MAX_PIXELS = 112 * 112


def vision_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[CONTROL_TOKENS[1], *CONTROL_TOKENS[3:]],
        chat_template=CHAT_TEMPLATE,
    )


CLASSES = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
PROCESSORS = {
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}
PATCH_SIZES = {"qwen2_5_vl": 14, "qwen2_vl": 14, "qwen3_vl": 16}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
TEXT = {
    "qwen2_5_vl": {"rope_parameters": ROPE},
    "qwen2_vl": {"rope_parameters": ROPE},
    "qwen3_vl": {"rope_parameters": {**ROPE, "mrope_interleaved": True}, "head_dim": 32},
}
VISION = {
    "qwen2_5_vl": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "out_hidden_size": 128,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "qwen2_vl": {"embed_dim": 128, "hidden_size": 128, "mlp_ratio": 2},
    "qwen3_vl": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}


def vision_model(seed: int = 0, kind: str = "qwen2_5_vl") -> PreTrainedModel:
    """Two layers of text and two of vision, with weights large enough that a wrong image or position shows."""
    tokenizer = vision_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in CONTROL_TOKENS}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **TEXT[kind],
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    vision = {
        "depth": 2,
        "num_heads": 4,
        "patch_size": PATCH_SIZES[kind],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **VISION[kind],
    }
    config = AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = CLASSES[kind](config).float()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.08)
    return model.eval()


def save_vision_model(folder: Path, seed: int = 0, kind: str = "qwen2_5_vl") -> Path:
    """Write the model's folder, with the processor's file as in that of Qwen2.5-VL."""
    model = vision_model(seed, kind)
    model.generation_config = GenerationConfig(eos_token_id=model.config.text_config.eos_token_id)
    model.save_pretrained(folder)
    vision_tokenizer().save_pretrained(folder)
    processor = {
        "processor_class": PROCESSORS[kind],
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH_SIZES[kind],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def picture(seed: int = 0, width: int = 84, height: int = 112) -> Image.Image:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()
