"""The policy that draws: a flow-matching model that computes the log-probs of denoising steps."""

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn

from async_grpo.algorithm.flow.sde import (
    sde_moments,
    sde_noise_scale,
    step_entropies,
    step_kl,
    step_logprobs,
)
from async_grpo.modeling import compute_device
from async_grpo.modeling.flow.families.family import FlowFamily
from async_grpo.modeling.flow.folder import FlowFolder
from async_grpo.modeling.flow.prompt_inputs import Condition, PromptInputs
from async_grpo.modeling.flow.schedule import FlowSchedule
from async_grpo.modeling.lora import lora_switched_off

BEFORE = 0  # index of the state before a denoising step, on the second axis of `latents`
AFTER = 1  # index of the state after the step, on the same axis


class FlowPolicy(nn.Module):
    """A flow-matching model whose denoising steps are the tokens of a sample.

    A sample is packed as a sequence [label, step, step, ...]: the number of its label, and the indices of its stochastic
    steps. `latents` has the states of the picture before and after each step. If the prompt is a text, the first token has
    no meaning, and `conditions` has the embeddings of the text.

    Args:
        model: A transformer of diffusers, which predicts the velocity of pictures or of latents.
        family: The model's family.
        schedule: The times of the denoising steps that are trained.
        noise_level: The factor a of the noise (`algorithm.flow.sde`).
        latent_shape: Channels, height and width of a state.
        guidance: Weight of the prompt against the negative prompt; 1 means no guidance.
        dtype: Dtype in which the model computes. States and log-probs are float32.
        keeps_reference: Whether to keep a frozen copy of the model as the reference of a KL penalty.
    """

    # Whether the reference is the model without its LoRA adapter. If so, no copy of the model is needed
    reference_is_base = False

    value_head = None  # always None, because there is no critic; `PolicyModel` has the same attribute

    def __init__(
        self,
        model: Any,
        family: FlowFamily,
        schedule: FlowSchedule,
        noise_level: float,
        latent_shape: tuple[int, int, int],
        *,
        guidance: float = 1.0,
        dtype: torch.dtype = torch.float32,
        keeps_reference: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.guidance = guidance
        self.dtype = dtype
        self.schedule = schedule
        self.noise_level = noise_level
        self.latent_shape = latent_shape
        self.reference: nn.Module | None = None
        if keeps_reference:
            self.reference = copy.deepcopy(model).requires_grad_(False)
        self.train()

    @classmethod
    def of_folder(
        cls,
        folder: FlowFolder,
        num_steps: int,
        noise_level: float,
        *,
        guidance: float = 1.0,
        dtype: torch.dtype = torch.float32,
        keeps_reference: bool = False,
    ) -> Self:
        """Load the model of a folder, and return the policy."""
        return cls(
            folder.load_model(),
            folder.family,
            folder.schedule(num_steps),
            noise_level,
            folder.latent_shape,
            guidance=guidance,
            dtype=dtype,
            keeps_reference=keeps_reference,
        )

    def train(self, mode: bool = True) -> Self:
        """Set the mode of this module, but leave the models in evaluation mode.

        In training mode, the models would drop labels at random, and the trainer's log-probs would differ from the
        engine's.
        """
        super().train(mode)
        self.model.eval()
        if self.reference is not None:
            self.reference.eval()
        return self

    @property
    def device(self) -> torch.device:
        """Return the device of the inputs and of the computation."""
        return compute_device(next(self.parameters()))

    def forward(
        self,
        input_ids: Int64[Tensor, " packed"],
        cu_seqlens: Int[Tensor, " boundaries"],
        loss_mask: Bool[Tensor, " packed"],
        latents: Float[Tensor, "packed 2 channels height width"] | None,
        conditions: Sequence[Condition] = (),
    ) -> tuple[Float[Tensor, " packed"], ...]:
        """Compute the log-probs of the denoising steps that the mask selects.

        Args:
            input_ids: Packed sequences end to end, each a label and indices of steps.
            cu_seqlens: Boundaries of the sequences.
            loss_mask: True at the steps whose log-probs are needed.
            latents: States of the pictures before and after each step; None if the mask is empty.
            conditions: The condition of each sequence; () if the prompts are labels, or if the mask is empty.

        Returns:
            (log-probs, entropies), and with a reference also its KL divergences; 0 where the mask is False. With an empty
            mask the log-probs still depend on the weights, because a rank that has nothing to train on must run the same
            backward pass as the other ranks.
        """
        first_tokens = cu_seqlens[:-1].to(input_ids.device, torch.int64)
        positions = loss_mask.index_fill(0, first_tokens, False).nonzero().flatten()
        num_trained = len(positions)
        if latents is None:
            latents = torch.zeros(len(input_ids), 2, *self.latent_shape, device=input_ids.device)
        if not num_trained:
            positions = first_tokens[:1] + 1
        prompts = self.prompts_of_steps(input_ids, cu_seqlens, positions, conditions)
        steps = input_ids[positions]
        results = self.step_results(prompts, steps, latents[positions])
        if not num_trained:
            # Add 0 times the results: the values stay 0, but the autograd graph reaches the weights
            return tuple(0.0 * result.sum() + result.new_zeros(len(input_ids)) for result in results)
        return tuple(result.new_zeros(len(input_ids)).index_copy(0, positions, result) for result in results)

    def prompts_of_steps(
        self,
        input_ids: Int64[Tensor, " packed"],
        cu_seqlens: Int[Tensor, " boundaries"],
        positions: Int64[Tensor, " steps"],
        conditions: Sequence[Condition],
    ) -> PromptInputs:
        """Return the prompts of steps. The label of a step is the first token of its sequence."""
        boundaries = cu_seqlens.to(input_ids.device, torch.int64)
        sequence_numbers = torch.searchsorted(boundaries, positions, right=True) - 1
        labels = input_ids[boundaries[sequence_numbers]]
        if self.family.reads_text and not conditions:
            # In a micro-batch without samples, which every rank must be able to compute, use a random condition
            conditions = [self.random_condition(np.random.default_rng(0))] * (len(boundaries) - 1)
        return PromptInputs.of_steps(labels, conditions, sequence_numbers.tolist())

    def random_condition(self, random: np.random.Generator) -> Condition:
        """Return random embeddings of a prompt; () if prompts are labels."""
        is_guided = self.family.needs_negative(self.guidance)
        return self.family.random_condition(self.model.config, random, is_guided=is_guided)

    def step_results(
        self,
        prompts: PromptInputs,
        steps: Int64[Tensor, " steps"],
        latents: Float[Tensor, "steps 2 channels height width"],
    ) -> tuple[Float[Tensor, " steps"], ...]:
        """Return (log-probs, entropies) of steps, and with a reference also its KL divergences.

        Args:
            prompts: The prompt of each step's picture.
            steps: Index of each step in the schedule.
            latents: States before and after each step.
        """
        before = latents[:, BEFORE]
        velocity = self.velocity(before, steps, prompts)
        mean, std = self.moments(before, velocity, steps)
        logprobs = step_logprobs(latents[:, AFTER], mean, std)
        entropies = step_entropies(std)
        if self.reference is None and not self.reference_is_base:
            return logprobs, entropies
        with torch.no_grad():
            reference_velocity = self._reference_velocity(before, steps, prompts)
            reference_mean, _ = self.moments(before, reference_velocity, steps)
        return logprobs, entropies, step_kl(mean, reference_mean, std)

    def _reference_velocity(
        self,
        x: Float[Tensor, "steps channels height width"],
        steps: Int64[Tensor, " steps"],
        prompts: PromptInputs,
    ) -> Float[Tensor, "steps channels height width"]:
        """Return the velocity of the reference: a copy of the initial model, or the model without its adapter."""
        timesteps = self.schedule.times(steps).timesteps
        if self.reference is not None:
            return self._predicted(self.reference, x, timesteps, prompts)
        with lora_switched_off(self.model):
            return self._predicted(self.model, x, timesteps, prompts)

    def velocity(
        self,
        x: Float[Tensor, "steps channels height width"],
        steps: Int64[Tensor, " steps"],
        prompts: PromptInputs,
        schedule: FlowSchedule | None = None,
    ) -> Float[Tensor, "steps channels height width"]:
        """Return the model's velocity at the states `x`, which are the states before denoising steps.

        Args:
            x: The states.
            steps: Index of each step in the schedule.
            prompts: The prompt of each step's picture.
            schedule: The times of the steps; None means the policy's schedule.
        """
        times = (schedule or self.schedule).times(steps)
        return self._predicted(self.model, x, times.timesteps, prompts)

    def velocity_at(
        self,
        x: Float[Tensor, "pairs channels height width"],
        timesteps: Float[Tensor, " pairs"],
        prompts: PromptInputs,
    ) -> Float[Tensor, "pairs channels height width"]:
        """Return the model's velocity at states of any times, which are given in the units of the model."""
        return self._predicted(self.model, x, timesteps, prompts)

    def _predicted(
        self,
        model: nn.Module,
        x: Float[Tensor, "steps channels height width"],
        timesteps: Float[Tensor, " steps"],
        prompts: PromptInputs,
    ) -> Float[Tensor, "steps channels height width"]:
        """Return the velocity that a model predicts, as float32."""
        velocity = self.family.predict(
            model, x.to(self.dtype), timesteps, prompts.to(self.dtype), self.guidance
        )
        return velocity.float()

    @torch.no_grad()
    def cast_weights(self) -> None:
        """Cast the model's weights to the dtype of the computation, for an engine. Buffers keep their dtype.

        A trainer does not need this: its shards stay in float32, and FSDP casts the weights when it gathers them.
        """
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(self.dtype)

    def moments(
        self,
        x: Float[Tensor, "steps channels height width"],
        velocity: Float[Tensor, "steps channels height width"],
        steps: Int64[Tensor, " steps"],
        schedule: FlowSchedule | None = None,
        noise_level: float | None = None,
    ) -> tuple[Float[Tensor, "steps channels height width"], Float[Tensor, " steps"]]:
        """Return mean and standard deviation of the states after stochastic steps.

        Args:
            x: States before the steps.
            velocity: Velocities at these states.
            steps: Indices of the steps.
            schedule: The times of the steps; None means the policy's schedule.
            noise_level: The factor of the noise; None means the policy's noise level.
        """
        schedule = schedule or self.schedule
        times = schedule.times(steps)
        level = self.noise_level if noise_level is None else noise_level
        scale = sde_noise_scale(times.begin, schedule.t_max, level)
        return sde_moments(x, velocity, times.begin, times.end, scale)
