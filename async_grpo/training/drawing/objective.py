"""`FlowObjective`: the objective for micro-batches whose units are denoising steps instead of tokens."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from async_grpo.errors import ConfigurationError
from async_grpo.messages import MicroBatch
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.objective import Objective


class FlowObjective(Objective):
    """Policy loss + kl_coef * KL to the reference, summed over denoising steps as a text's loss is summed over tokens.

    At each denoising step, policy and reference are normal distributions. The KL penalty is their exact divergence, not
    an estimate from log-probs.
    """

    def check_inputs(self, batch: MicroBatch) -> None:
        """Check that a batch has the states of its pictures.

        Raises:
            ConfigurationError: The states are missing, because another kind of engine made the samples.
        """
        if batch.latents is None and not batch.is_dummy:
            raise ConfigurationError(
                "the samples hold no pictures, but --policy flow trains on denoising steps: use --engine drawing"
            )

    def forward(self, policy: torch.nn.Module, batch: BatchTensors) -> tuple[Float[Tensor, "1 packed"], ...]:
        """Return (log-probs, entropies) of the trained denoising steps, and keep their KL divergences in the batch."""
        outputs = policy(batch.input_ids, batch.cu_seqlens, batch.mask[0], batch.latents, batch.conditions)
        logprobs, entropies, *divergences = (output[None] for output in outputs)
        batch.kl_to_reference = divergences[0] if divergences else None
        return logprobs, entropies

    def _kl_to_reference(
        self, logprobs: Float[Tensor, "1 packed"], batch: BatchTensors, mask: Bool[Tensor, "1 packed"]
    ) -> Float[Tensor, "1 packed"]:
        """Return the KL penalty of each denoising step; 0 if there is no reference, or where the mask is False."""
        if batch.kl_to_reference is None:
            return torch.zeros_like(logprobs)
        return torch.where(mask, batch.kl_to_reference, 0)
