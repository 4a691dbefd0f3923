"""The prompts of a flow-matching model as inputs of the network: numbers of labels, or embeddings of texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

# The form in which an engine sends a prompt to the trainer. For a text: embeddings (L, D) and pooled embeddings (P,),
# both float32, with P = 0 if the model reads none. With guidance, the same two arrays of the negative prompt follow.
# For a label: ()
Condition = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class TextInputs:
    """Embeddings of the text of each denoising step, padded to the longest text."""

    embeddings: Float[Tensor, "steps text features"]
    mask: Bool[Tensor, "steps text"]  # False at padding
    pooled: Float[Tensor, "steps pooled"]

    @classmethod
    def stacked(
        cls, texts: Sequence[tuple[np.ndarray, np.ndarray]], rows: Sequence[int], device: torch.device
    ) -> Self:
        """Return the inputs of steps.

        Args:
            texts: Embeddings (L, D) and pooled embeddings (P,) of different texts.
            rows: For each step, the index of its text.
            device: Device of the inputs.
        """
        embeddings = [torch.from_numpy(array) for array, _ in texts]
        lengths = torch.tensor([len(tensor) for tensor in embeddings])
        padded = torch.nn.utils.rnn.pad_sequence(embeddings, batch_first=True).to(device)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        pooled = torch.stack([torch.from_numpy(array) for _, array in texts]).to(device)
        index = torch.tensor(rows, device=device)
        return cls(padded[index], mask.to(device)[index], pooled[index])

    def followed_by(self, negative: "TextInputs") -> "TextInputs":
        """Return these inputs followed by those of the negative prompts, padded to the same length."""
        length = max(self.mask.shape[1], negative.mask.shape[1])
        prompts = self._padded(length)
        negatives = negative._padded(length)
        return TextInputs(
            torch.cat([prompts.embeddings, negatives.embeddings]),
            torch.cat([prompts.mask, negatives.mask]),
            torch.cat([prompts.pooled, negatives.pooled]),
        )

    def to(self, dtype: torch.dtype) -> "TextInputs":
        """Return the inputs with their embeddings cast to a dtype."""
        return TextInputs(self.embeddings.to(dtype), self.mask, self.pooled.to(dtype))

    def _padded(self, length: int) -> "TextInputs":
        missing = length - self.mask.shape[1]
        return TextInputs(
            torch.nn.functional.pad(self.embeddings, (0, 0, 0, missing)),
            torch.nn.functional.pad(self.mask, (0, missing)),
            self.pooled,
        )


@dataclass(frozen=True)
class PromptInputs:
    """The prompts of some denoising steps as inputs of a model."""

    labels: Int64[Tensor, " steps"]  # numbers of labels, which only class-conditional models read
    text: TextInputs | None = None  # None if the model reads labels
    negative: TextInputs | None = None  # the negative prompts, if the model is guided by them

    @classmethod
    def of_steps(
        cls, labels: Int64[Tensor, " steps"], conditions: Sequence[Condition], rows: Sequence[int]
    ) -> Self:
        """Return the inputs of denoising steps.

        Args:
            labels: The label of each step. Models that read texts ignore it.
            conditions: The conditions of prompts. Equal prompts may share one array, which is then copied once.
            rows: For each step, the index of its condition.
        """
        if not any(conditions):
            return cls(labels)
        # The members of a group share their arrays, so move each array to the device only once
        first_rows: dict[int, int] = {}
        different: list[Condition] = []
        place_of: list[int] = []
        for condition in conditions:
            key = id(condition[0])
            if key not in first_rows:
                first_rows[key] = len(different)
                different.append(condition)
            place_of.append(first_rows[key])
        places = [place_of[row] for row in rows]
        text = TextInputs.stacked([(item[0], item[1]) for item in different], places, labels.device)
        negative = None
        if len(different[0]) == 4:
            negative = TextInputs.stacked([(item[2], item[3]) for item in different], places, labels.device)
        return cls(labels, text, negative)

    def to(self, dtype: torch.dtype) -> "PromptInputs":
        """Return the inputs with their embeddings cast to a dtype."""
        return PromptInputs(
            self.labels,
            self.text and self.text.to(dtype),
            self.negative and self.negative.to(dtype),
        )
