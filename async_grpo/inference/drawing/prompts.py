"""Reads prompts for the engine that draws, and turns its results into pixels.

A model either reads labels and draws pixels, or reads texts and draws latents that a VAE decodes.
"""

from collections import OrderedDict
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from async_grpo.errors import ConfigurationError
from async_grpo.inference.drawing.pictures import DrawnPrompt
from async_grpo.modeling.flow.folder import FlowFolder
from async_grpo.modeling.flow.policy import FlowPolicy

# Number of prompts whose embeddings are kept in memory. A group is a single request, but its prompt comes again in
# evaluations and later epochs
MAX_ENCODED_PROMPTS = 256


class PromptReader(Protocol):
    """Converts prompts into the model's input, and finished states into pixels."""

    def read(self, prompt_token_ids: np.ndarray) -> DrawnPrompt:
        """Return a prompt as the model's input. Runs in the engine's thread.

        Raises:
            ConfigurationError: It is no prompt of this model.
        """

    def decode(self, states: Tensor) -> Tensor:
        """Return finished states as pictures with values from -1 to 1. Runs in the engine's thread.

        Args:
            states: States (pictures, channels, height, width).

        Returns:
            The pictures (pictures, 1 or 3, height in pixels, width in pixels).
        """


class LabelReader:
    """Reads the numbers of labels. The model draws pixels.

    Args:
        num_labels: Number of the model's labels.
    """

    def __init__(self, num_labels: int) -> None:
        self._num_labels = num_labels

    def read(self, prompt_token_ids: np.ndarray) -> DrawnPrompt:
        """Return the label. See `PromptReader`."""
        is_label = len(prompt_token_ids) == 1 and 0 <= prompt_token_ids[0] < self._num_labels
        if not is_label:
            raise ConfigurationError(
                f"a prompt must be one number below {self._num_labels}, the label to draw, not "
                f"{prompt_token_ids[:8].tolist()}"
            )
        return DrawnPrompt(int(prompt_token_ids[0]))

    def decode(self, states: Tensor) -> Tensor:
        """Return the states as they are, because they are pixels. See `PromptReader`."""
        return states


class TextReader:
    """Encodes texts with the text encoders of a pipeline, each prompt once, and decodes latents with its VAE.

    Args:
        folder: The folder of the pipeline.
        policy: The policy, on the device that is used.
    """

    def __init__(self, folder: FlowFolder, policy: FlowPolicy) -> None:
        self._family = folder.family
        self._is_guided = folder.family.needs_negative(policy.guidance)
        on_gpu = policy.device.type == "cuda"
        self._pipeline: Any = folder.load_pipeline(policy.model, torch.bfloat16 if on_gpu else torch.float32)
        self._pipeline.to(policy.device)
        self._prompts: OrderedDict[bytes, DrawnPrompt] = OrderedDict()

    @torch.no_grad()
    def read(self, prompt_token_ids: np.ndarray) -> DrawnPrompt:
        """Return the embeddings of a text. The token ids are its bytes in UTF-8. See `PromptReader`."""
        try:
            text_bytes = bytes(prompt_token_ids.tolist())
            text = text_bytes.decode()
        except ValueError as error:
            raise ConfigurationError(f"a prompt must be the bytes of a text in UTF-8: {error}") from error
        if text_bytes not in self._prompts:
            condition = self._family.encode(self._pipeline, text, is_guided=self._is_guided)
            self._prompts[text_bytes] = DrawnPrompt(0, condition)
            if len(self._prompts) > MAX_ENCODED_PROMPTS:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(text_bytes)
        return self._prompts[text_bytes]

    @torch.no_grad()
    def decode(self, states: Tensor) -> Tensor:
        """Decode latents with the VAE. See `PromptReader`."""
        return self._family.decode(self._pipeline.vae, states)


def prompt_reader(folder: FlowFolder, policy: FlowPolicy) -> PromptReader:
    """Return the reader of a model's prompts, and load the models that it needs."""
    return TextReader(folder, policy) if folder.family.reads_text else LabelReader(folder.num_labels)
