"""Prompts with pictures for the tiny Qwen2.5-VL, and the log-probs that transformers computes for each sequence alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor
from vision_model import encoded, picture, vision_tokenizer

from async_grpo.experience.dataset import Question, questions_of
from async_grpo.experience.image_prompts import ImagePrompts
from async_grpo.experience.plain_values import data_url
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.modeling.image_models import ImageReader
from async_grpo.modeling.load import load_config

MOST_TOKENS = 512


def url(image: Image.Image) -> str:
    return data_url(encoded(image), "image/png")


def image_prompts(folder: Path, run_images: Path) -> ImagePrompts:
    """What a run makes of the model in a folder."""
    config = load_config(folder)
    tokenizer = vision_tokenizer()
    reader = ImageReader.load(folder, config)
    return ImagePrompts(tokenizer, PromptRenderer(tokenizer), reader, config.image_token_id, run_images)


def question(folder: Path, run_images: Path, row: dict[str, Any], data_folder: Path = Path()) -> Question:
    """The question of a row, whose images are stored."""
    prompts = image_prompts(folder, run_images)
    tokenizer = vision_tokenizer()
    (made,) = questions_of(
        [("here:1", row)],
        tokenizer,
        MOST_TOKENS,
        len(tokenizer),
        PromptRenderer(tokenizer),
        prompts,
        data_folder,
    )
    prompts.store([image.digest for image in made.images])
    return made


def picture_row(seeds: Sequence[int], text: str = "What is this?") -> dict[str, Any]:
    """A row with pictures of these seeds, of different sizes."""
    parts = [{"type": "image", "image": url(seeded_picture(seed))} for seed in seeds]
    content = [*parts, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "answer": "7"}


def seeded_picture(seed: int) -> Image.Image:
    """Pictures of even seeds are upright, those of odd seeds lie on the side."""
    return picture(seed, 84, 112) if seed % 2 == 0 else picture(seed, 112, 56)


def logprobs_alone(
    model: torch.nn.Module, folder: Path, token_ids: np.ndarray, images: Sequence[Image.Image]
) -> np.ndarray:
    """The log-probs (N,) of a sequence by transformers' own forward of this sequence alone; the first is 0."""
    ids = torch.tensor(token_ids, dtype=torch.int64)[None]
    arguments: dict[str, Any] = {}
    if images:
        processor = AutoImageProcessor.from_pretrained(folder)
        arguments = dict(processor(images=list(images), return_tensors="pt"))
        arguments["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **arguments).logits[0].float()
    chosen = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()]).astype(np.float32)
