"""Handwritten digits in two inks, and a small network that reads them.

`digits.csv.gz` is the data set that scikit-learn ships: 1,797 gray pictures of 8 x 8 pixels (E. Alpaydin and C. Kaynak,
"Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0).

A prompt of the drawing demo has two parts, an ink and a digit, such as "gray 7". `digits_model.py` trains the model that
draws them.
"""

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.data import FOLDER

DIGITS_FILE = FOLDER / "digits.csv.gz"
READER_FILE = FOLDER / "digit-reader.npz"
SIZE = 8  # height and width of a picture, in pixels
NUM_DIGITS = 10
WHITE = "white"  # as in the data set
GRAY = "gray"  # half as bright
INKS = (WHITE, GRAY)
GRAY_BRIGHTNESS = 0.5
HIGHEST_PIXEL = 16


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures (1797, 8, 8) float32, from -1 (paper) to 1 (ink), and their digits (1797,) int64."""
    with gzip.open(DIGITS_FILE, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    pixels = table[:, :-1].reshape(-1, SIZE, SIZE)
    return 2 * pixels / HIGHEST_PIXEL - 1, table[:, -1].astype(np.int64)


def gray_of(white_pictures: Any) -> Any:
    """Return pictures in white ink, an array or a tensor with values from -1 to 1, in gray ink."""
    return GRAY_BRIGHTNESS * (white_pictures + 1) - 1


def label_of(digit: Any, ink: Any) -> Any:
    """Return the label of a digit in an ink, which is given by its number in INKS: numbers, or arrays of them."""
    return digit * len(INKS) + ink


def label_names() -> dict[int, str]:
    """Return the prompt of each label.

    >>> label_names()[label_of(7, 1)]
    'gray 7'
    """
    names = {}
    for digit in range(NUM_DIGITS):
        for number, ink in enumerate(INKS):
            names[label_of(digit, number)] = f"{ink} {digit}"
    return names


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
    head = torch.nn.Linear(num_hidden, NUM_DIGITS)
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
