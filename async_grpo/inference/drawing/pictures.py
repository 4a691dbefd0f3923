"""Unfinished pictures of the engine that draws, and PNG files of finished pictures."""

import asyncio
import io
import time
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image

from async_grpo.modeling.flow.prompt_inputs import Condition
from async_grpo.modeling.flow.schedule import FlowSchedule
from async_grpo.types import Completion, FinishReason

MAX_TOKEN_ID = 2**31 - 1  # token ids are int32


@dataclass(frozen=True)
class Denoising:
    """Settings with which a picture is drawn. Pictures with equal settings can be computed in one forward pass."""

    schedule: FlowSchedule
    noise_level: float  # 0 draws without noise after the first state (ODE)


@dataclass(frozen=True)
class DrawnPrompt:
    """A prompt as the flow-matching model reads it: a label, or the embeddings of a text."""

    label: int  # number of the label; any number if the prompt is a text
    condition: Condition = ()  # embeddings of a text; () if the prompt is a label


@dataclass
class Picture:
    """A picture that is being drawn: its current state, and the steps that are its tokens.

    Args:
        member: Index of the picture in its group.
        prompt: The prompt to draw.
        denoising: How it is drawn.
        stochastic: Indices of its stochastic steps.
        generator: Source of its noise, so that a seed always gives the same picture.
        shape: Channels, height and width of the state.
        keeps_finished: Whether the trainer needs the finished picture instead of its stochastic steps.
    """

    member: int
    prompt: DrawnPrompt
    denoising: Denoising
    stochastic: range
    generator: torch.Generator
    shape: tuple[int, int, int]
    keeps_finished: bool = False
    step: int = 0  # number of finished steps
    png: bytes = b""  # the finished picture as a PNG file; b"" until it is decoded
    begun_at: float = field(default_factory=time.time)  # Unix time
    # Set to the completion when the picture is finished
    completion: asyncio.Future[Completion] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self.state = self.noise()  # (channels, height, width) float32 on the CPU
        self._steps: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._latents: list[np.ndarray] = []

    @property
    def is_stochastic(self) -> bool:
        """Return whether the next step is stochastic."""
        return self.step in self.stochastic

    @property
    def is_finished(self) -> bool:
        """Return whether all steps are done."""
        return self.step == self.denoising.schedule.num_steps

    def noise(self) -> torch.Tensor:
        """Draw noise in the shape of the picture."""
        return torch.randn(self.shape, generator=self.generator)

    def advance(self, state: torch.Tensor, logprob: float, policy_version: int) -> None:
        """Record the next step.

        Args:
            state: The state after the step, (channels, height, width).
            logprob: The step's log-prob, if it is stochastic.
            policy_version: Version of the policy that computed the step.
        """
        has_no_noise = not self.denoising.noise_level
        if self.is_stochastic or has_no_noise:
            # Without noise, a step is not sampled and its log-prob is 0. The picture is not trained on, but its steps
            # are counted
            self._steps.append(self.step)
            self._logprobs.append(0.0 if has_no_noise else logprob)
            self._versions.append(policy_version)
        if self.is_stochastic:
            self._latents.append(torch.stack([self.state, state]).numpy())
        self.state = state
        self.step += 1

    def finished(self) -> Completion:
        """Return the completion of the finished picture."""
        if self.keeps_finished:
            self._become_one_token()
        return Completion(
            token_ids=np.array(self._steps, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            versions=np.array(self._versions, np.int32),
            finish_reason=FinishReason.STOP,
            text="",
            member=self.member,
            latents=np.stack(self._latents) if self._latents else None,
            # The embeddings of a prompt are large, so only samples that can be trained on keep them
            condition=self.prompt.condition if self._latents else (),
            picture_png=self.png,
        )

    def _become_one_token(self) -> None:
        """Replace the steps by a single token, the finished picture, of the oldest policy version that drew it.

        The id of the token is the seed of the noises with which the trainer mixes the picture. So these are the same
        however pictures are packed, and after a resumption.
        """
        self._steps = [int(torch.randint(MAX_TOKEN_ID, (), generator=self.generator))]
        self._logprobs = [0.0]
        self._versions = [min(self._versions)]
        self._latents = [self.state[None].numpy()]


def png_of(picture: np.ndarray) -> bytes:
    """Return a picture (channels, height, width), with values from -1 to 1, as a PNG file, gray or RGB."""
    values = np.clip((picture + 1) / 2, 0, 1)
    pixels = np.round(255 * values).astype(np.uint8).transpose(1, 2, 0)
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
