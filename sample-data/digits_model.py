"""A small model that draws digits in white or in gray ink.

The model is a class-conditional DiT of 1.1 million parameters in the format of diffusers. It is trained by flow matching on
pictures of which a part is labeled with a wrong digit. So it draws well, but often draws another digit than it was asked
for, and reinforcement learning has something to teach.

A DiT has one label for each prompt, here for each pair of a digit and an ink. An independent embedding of each label would
hide from the model which labels share their digit or their ink. So an embedding is the sum of a digit's and an ink's
while the model is trained. The written model has a table of these sums. Reinforcement learning with some pairs was then
seen to improve the others, too; with independent embeddings of ten digits, those that were not trained became worse.
"""

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from async_grpo.data.digits import INKS, NUM_DIGITS, SIZE, gray_of, label_names, label_of, read_digits
from async_grpo.data.smollm2 import cache_folder, made_once

# Part of the pictures whose digit is replaced by a random one in the label when the model is trained
WRONG_DIGITS = 0.4
MODEL_CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 1,
    "num_layers": 3,
    "sample_size": SIZE,
    "patch_size": 4,
    "num_embeds_ada_norm": NUM_DIGITS * len(INKS),
}
NUM_TRAINING_STEPS = 1500
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
LOG_EVERY = 200
# Changes with the recipe above, so that a model of another recipe is not taken from the cache
RECIPE = "inks-v1"
log = logging.getLogger(__name__)


class ComposedEmbedding(nn.Module):
    """The embeddings of labels as sums of an embedding of the digit and one of the ink.

    Args:
        width: Size of an embedding.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.digits = nn.Embedding(NUM_DIGITS, width)
        self.inks = nn.Embedding(len(INKS), width)

    def forward(self, labels: Int[Tensor, " labels"]) -> Float[Tensor, "labels width"]:
        """Return the embeddings of labels."""
        digits = torch.div(labels, len(INKS), rounding_mode="floor")
        return self.digits(digits) + self.inks(labels % len(INKS))


def cached_digits_model() -> Path:
    """Return the folder of the drawing model in the user's cache. The first call trains it, in one to two minutes.

    Raises:
        ImportError: diffusers is not installed.
    """
    return made_once(cache_folder("digits-dit", RECIPE), make_digits_model)


def make_digits_model(folder: Path, *, num_steps: int = NUM_TRAINING_STEPS, seed: int = 0) -> float:
    """Train the drawing model, and write its folder in the format of diffusers.

    Args:
        folder: The folder to write, which must not exist.
        num_steps: Number of training steps; 0 writes a random model.
        seed: Seed of the weights and of the training.

    Returns:
        The mean loss of the last 100 steps.

    Raises:
        ImportError: diffusers is not installed.
    """
    import diffusers

    torch.manual_seed(seed)
    model: Any = diffusers.DiTTransformer2DModel(**MODEL_CONFIG)
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    loss = train_flow(model, scheduler, num_steps, seed) if num_steps else math.nan
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished / "transformer")
    scheduler.save_pretrained(unfinished / "scheduler")
    index = {
        "_class_name": "DiTPipeline",
        "id2label": {str(label): name for label, name in label_names().items()},
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "vae": [None, None],
    }
    (unfinished / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(folder)
    return loss


def train_flow(model: Any, scheduler: Any, num_steps: int, seed: int) -> float:
    """Train a model to predict the velocity from pictures to noise (conditional flow matching, Lipman et al. 2022).

    Returns:
        The mean loss of the last 100 steps.
    """
    random = torch.Generator().manual_seed(seed)
    pictures, labels = labeled_pictures(random)
    _compose_embeddings(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps)
    # Not in training mode, in which the model would drop labels for classifier-free guidance
    model.eval()
    losses = []
    for step in range(num_steps):
        rows = torch.randint(len(labels), (BATCH_SIZE,), generator=random)
        x_0 = pictures[rows][:, None]
        noise = torch.randn(x_0.shape, generator=random)
        t = torch.rand(BATCH_SIZE, generator=random)
        x_t = torch.lerp(x_0, noise, t[:, None, None, None])
        timesteps = t * scheduler.config.num_train_timesteps
        predicted = model(x_t, timestep=timesteps, class_labels=labels[rows]).sample
        loss = (predicted - (noise - x_0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if (step + 1) % LOG_EVERY == 0:
            log.info("step %d of %d: loss %.3f", step + 1, num_steps, np.mean(losses[-LOG_EVERY:]))
    _fold_embeddings(model)
    return float(np.mean(losses[-100:]))


def labeled_pictures(
    random: torch.Generator,
) -> tuple[Float[Tensor, "pictures y x"], Int[Tensor, " pictures"]]:
    """Return each picture of the data set in each ink, with its label, in a part of which the digit is a random one."""
    white_pictures, digits = (torch.from_numpy(array) for array in read_digits())
    pictures = torch.cat([white_pictures, gray_of(white_pictures)])  # in the order of INKS
    inks = torch.arange(len(INKS)).repeat_interleave(len(digits))
    true_digits = digits.repeat(len(INKS))
    is_wrong = torch.rand(len(true_digits), generator=random) < WRONG_DIGITS
    random_digits = torch.randint(NUM_DIGITS, true_digits.shape, generator=random)
    label_digits = torch.where(is_wrong, random_digits, true_digits)
    return pictures, label_of(label_digits, inks)


def _compose_embeddings(model: Any) -> None:
    """Replace the table of labels in each block by a `ComposedEmbedding`."""
    for block in model.transformer_blocks:
        embedder = block.norm1.emb.class_embedder
        embedder.embedding_table = ComposedEmbedding(embedder.embedding_table.embedding_dim)


def _fold_embeddings(model: Any) -> None:
    """Replace each `ComposedEmbedding` by a table of its sums, the form that diffusers writes and reads."""
    all_labels = torch.arange(NUM_DIGITS * len(INKS))
    for block in model.transformer_blocks:
        embedder = block.norm1.emb.class_embedder
        with torch.no_grad():
            sums = embedder.embedding_table(all_labels)
        # diffusers' table has one more row, for "no label", which this model does not know
        no_label = torch.zeros(1, sums.shape[1])
        embedder.embedding_table = nn.Embedding.from_pretrained(torch.cat([sums, no_label]), freeze=False)
