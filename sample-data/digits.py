"""Handwritten digits, a small model that draws them, and a small network that reads them.

`digits.csv.gz` is the data set that scikit-learn ships: 1,797 gray pictures of 8 x 8 pixels (E. Alpaydin and C. Kaynak,
"Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0).

The drawing model is a class-conditional DiT of 1.1 million parameters in the format of diffusers. It is trained by flow
matching on pictures of which a part has a wrong label. So it draws well, but often draws another digit than it was
asked for, and reinforcement learning has something to teach.
"""

import gzip
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.data import FOLDER

DIGITS_FILE = FOLDER / "digits.csv.gz"
READER_FILE = FOLDER / "digit-reader.npz"
SIZE = 8  # height and width of a picture, in pixels
NUM_LABELS = 10
HIGHEST_PIXEL = 16
# Part of the labels that are replaced by random ones when the drawing model is trained
WRONG_LABELS = 0.4
MODEL_CONFIG = {
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "in_channels": 1,
    "num_layers": 3,
    "sample_size": SIZE,
    "patch_size": 4,
    "num_embeds_ada_norm": NUM_LABELS,
}
NUM_TRAINING_STEPS = 1500
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
LOG_EVERY = 200
# Changes with the recipe above, so that a model of another recipe is not taken from the cache
RECIPE = "digits-v1"
log = logging.getLogger(__name__)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures (1797, 8, 8) float32, from -1 (paper) to 1 (ink), and their digits (1797,) int64."""
    with gzip.open(DIGITS_FILE, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    pixels = table[:, :-1].reshape(-1, SIZE, SIZE)
    return 2 * pixels / HIGHEST_PIXEL - 1, table[:, -1].astype(np.int64)


def cached_digits_model() -> Path:
    """Return the folder of the drawing model in the user's cache. The first call trains it, in one to two minutes.

    Raises:
        ImportError: diffusers is not installed.
    """
    # Rewards import this module, too, and should not load more than they need
    from async_grpo.data.smollm2 import cache_folder, locked

    folder = cache_folder("digits-dit", RECIPE)
    with locked(folder):
        if not folder.is_dir():
            make_digits_model(folder)
    return folder


def make_digits_model(
    folder: Path, *, num_steps: int = NUM_TRAINING_STEPS, wrong_labels: float = WRONG_LABELS, seed: int = 0
) -> float:
    """Train the drawing model, and write its folder in the format of diffusers.

    Args:
        folder: The folder to write, which must not exist.
        num_steps: Number of training steps; 0 writes a random model.
        wrong_labels: Part of the labels that are replaced by random ones.
        seed: Seed of the weights and of the training.

    Returns:
        The mean loss of the last 100 steps.

    Raises:
        ImportError: diffusers is not installed.
    """
    import diffusers
    import torch

    torch.manual_seed(seed)
    model: Any = diffusers.DiTTransformer2DModel(**MODEL_CONFIG)
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler()
    loss = train_flow(model, scheduler, num_steps, wrong_labels, seed) if num_steps else math.nan
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished / "transformer")
    scheduler.save_pretrained(unfinished / "scheduler")
    index = {
        "_class_name": "DiTPipeline",
        "id2label": {str(digit): str(digit) for digit in range(NUM_LABELS)},
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "vae": [None, None],
    }
    (unfinished / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    unfinished.rename(folder)
    return loss


def train_flow(model: Any, scheduler: Any, num_steps: int, wrong_labels: float, seed: int) -> float:
    """Train a model to predict the velocity from pictures to noise (conditional flow matching, Lipman et al. 2022).

    Returns:
        The mean loss of the last 100 steps.
    """
    import torch

    pictures, digits = (torch.from_numpy(array) for array in read_digits())
    random = torch.Generator().manual_seed(seed)
    is_wrong = torch.rand(len(digits), generator=random) < wrong_labels
    random_digits = torch.randint(NUM_LABELS, digits.shape, generator=random)
    labels = torch.where(is_wrong, random_digits, digits)
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
    return float(np.mean(losses[-100:]))


class DigitReader:
    """A network with one hidden layer that reads a digit. It needs only numpy, so that a reward starts fast.

    Args:
        weights: The arrays of `READER_FILE`.
    """

    def __init__(self, weights: Any) -> None:
        self._hidden_weight = weights["hidden_weight"]  # (64, hidden)
        self._hidden_bias = weights["hidden_bias"]  # (hidden,)
        self._head_weight = weights["head_weight"]  # (hidden, 10)
        self._head_bias = weights["head_bias"]  # (10,)

    @classmethod
    def load(cls) -> "DigitReader":
        """Return the reader that is shipped."""
        with np.load(READER_FILE, allow_pickle=False) as weights:
            return cls(dict(weights))

    def probabilities(self, pictures: np.ndarray) -> np.ndarray:
        """Return the probability of each digit, (n, 10), of pictures (n, 8, 8) with values from -1 to 1."""
        inputs = pictures.reshape(len(pictures), -1)
        hidden = np.maximum(inputs @ self._hidden_weight + self._hidden_bias, 0)
        logits = hidden @ self._head_weight + self._head_bias
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)


def train_reader(path: Path, *, num_hidden: int = 96, num_steps: int = 3000, seed: int = 0) -> float:
    """Train the reader on three quarters of the digits, and write its weights.

    Pictures are shifted by up to a pixel and get noise, so that the reader is not easily deceived.

    Args:
        path: The file to write.
        num_hidden: Size of the hidden layer.
        num_steps: Number of training steps.
        seed: Seed of the weights and of the training.

    Returns:
        The accuracy on the other quarter.
    """
    import torch
    from torch.nn.functional import cross_entropy

    pictures, digits = (torch.from_numpy(array) for array in read_digits())
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    order = torch.randperm(len(digits), generator=random)
    held_out = order[: len(order) // 4]
    training = order[len(order) // 4 :]
    hidden_layer = torch.nn.Linear(SIZE * SIZE, num_hidden)
    head = torch.nn.Linear(num_hidden, NUM_LABELS)
    network = torch.nn.Sequential(hidden_layer, torch.nn.ReLU(), head)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    for _ in range(num_steps):
        rows = training[torch.randint(len(training), (128,), generator=random)]
        batch = pictures[rows]
        shifts = torch.randint(-1, 2, (2,), generator=random).tolist()
        if torch.rand((), generator=random) < 0.3:
            batch = torch.roll(batch, shifts, dims=(1, 2))
        batch = batch + 0.3 * torch.randn(batch.shape, generator=random)
        loss = cross_entropy(network(batch.flatten(1)), digits[rows], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        answers = network(pictures[held_out].flatten(1)).argmax(dim=1)
        np.savez(
            path,
            hidden_weight=hidden_layer.weight.T.numpy(),
            hidden_bias=hidden_layer.bias.numpy(),
            head_weight=head.weight.T.numpy(),
            head_bias=head.bias.numpy(),
        )
    return float((answers == digits[held_out]).float().mean())
