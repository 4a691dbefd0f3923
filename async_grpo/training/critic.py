"""Train a critic that is a separate model (`--critic-model`): its values, gradients and updates."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from async_grpo.modeling import copies, local_shard
from async_grpo.modeling.critic import CriticModel
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.gradient_norms import squared_norms
from async_grpo.training.metric_totals import metric_totals
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import release_gathered


@dataclass
class Critic:
    """A critic that is a separate model, sharded like the policy, with its own optimizer and learning rate.

    Its gradient comes only from the value loss. The gradient is clipped by its own norm, not together with the
    policy's.
    """

    model: CriticModel
    optimizer: Optimizer
    scheduler: LambdaLR
    max_grad_norm: float
    # Number of steps at the start of the run that train only the critic, not the policy
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # Number of ranks that have the same shard. A sum of squares over all ranks is divided by it, as in
        # `GradientAccumulator`
        self._num_copies = copies(self._parameters[0])

    def trains_alone(self, steps_done: int) -> bool:
        """Return whether the next step trains only the critic and leaves the policy unchanged."""
        return steps_done < self.warmup_steps

    @torch.no_grad()
    def values(self, batch: BatchTensors) -> Float[Tensor, "1 packed"]:
        """Return the critic's values of a micro-batch's tokens, without gradients.

        A collective if the critic is sharded.
        """
        values = self._forward(batch)
        release_gathered(self.model)
        return values

    def add_gradient(self, objective: Objective, batch: BatchTensors) -> dict[str, Tensor]:
        """Add the gradient of a micro-batch's value loss, and return the totals of its metrics."""
        values = self._forward(batch)
        losses, metrics = objective.value_losses(values, batch, batch.kept)
        # The loss is a sum over tokens. `update` later divides its gradient by the same number as the policy's gradient
        objective.aggregate(losses, batch, batch.kept).backward()
        return metric_totals(metrics | {"value_loss": losses})

    def _forward(self, batch: BatchTensors) -> Float[Tensor, "1 packed"]:
        """Return the critic's values of a micro-batch's tokens.

        Call it after the policy's forward pass, which sets `image_inputs`.
        """
        values = self.model(batch.input_ids, batch.cu_seqlens, batch.mask[0], batch.image_inputs)
        return values[None]

    def gradient_square(self) -> Float64[Tensor, ""]:
        """Return the squared norm of the summed gradient, over the shards of this rank only."""
        return squared_norms(self._gradients()).sum() / self._num_copies

    def update(self, scale: float, gradient_square: float) -> dict[str, float]:
        """Take an optimizer step with the summed gradient.

        Args:
            scale: Factor that turns the sum over micro-batches and ranks into the mean over the step.
            gradient_square: Squared norm of the sum, over all ranks.

        Returns:
            The metrics of the update.
        """
        learning_rate = float(self.scheduler.get_last_lr()[0])
        grad_norm = scale * math.sqrt(gradient_square)
        clip = min(1.0, self.max_grad_norm / (grad_norm + 1e-6))
        torch._foreach_mul_([local_shard(gradient) for gradient in self._gradients()], scale * clip)
        self.optimizer.step()
        self.scheduler.step()
        return {"critic_grad_norm": grad_norm, "critic_lr": learning_rate}

    def discard_gradient(self) -> None:
        """Free the gradient after the step."""
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]
