"""`BatchTensors`: a micro-batch as tensors on the trainer's device."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.messages import MicroBatch
from async_grpo.modeling.image_models import ImageInputs
from async_grpo.training.observations import observation_mask
from async_grpo.types import ImageReference


class BatchTensors:
    """A micro-batch on the trainer's device: all its sequences, one after the other, in one row of N tokens.

    Some objectives have terms that depend on the whole step. For these, the module `whole_step` sets the following
    fields before the backward pass: always `logprobs` and `kept`; and, if the objective needs them, `returns`,
    `old_values`, `selected`, `has_high_entropy`, `weight_mean`, `units_per_observation` and `tokens_per_observation`.
    It may also replace `advantages` and `group_tokens`.
    """

    returns: Float[Tensor, "1 packed"] | None = None  # targets of the critic
    old_values: Float[Tensor, "1 packed"] | None = None  # the critic's values before the step
    selected: Bool[Tensor, "1 packed"] | None = None  # tokens that the loss clip_cov or kl_cov selects
    # True at tokens whose entropy is high enough to be trained on by the policy loss; None if all tokens are
    has_high_entropy: Bool[Tensor, "1 packed"] | None = None
    # KL divergence of each denoising step from the reference policy; set if the policy draws and has a reference
    kl_to_reference: Float[Tensor, "1 packed"] | None = None
    # The policy's log-probs of the k tokens that the teacher finds most probable, with gradients. `Objective.forward`
    # sets them
    further_logprobs: Float[Tensor, "1 packed k"] | None = None
    weight_mean: float | None = None  # mean importance weight of the step; all weights are divided by it
    # Log-probs under the weights before the step of the first pass (`FirstPass.logprobs`); None in the first pass
    start_logprobs: Float[Tensor, "1 packed"] | None = None
    # (Divisor of the step's loss) / (number of observation tokens in the step), and (number of trained tokens in the
    # step) / (number of observation tokens in the step)
    units_per_observation: float = 0.0
    tokens_per_observation: float = 0.0

    # Log-probs and entropies under the weights before the step, without gradient
    logprobs: Float[Tensor, "1 packed"]
    entropy: Float[Tensor, "1 packed"]
    # `mask` without the tokens that the rejection options (`--rejection-*`) leave out
    kept: Bool[Tensor, "1 packed"]

    input_ids: Int64[Tensor, " packed"]
    cu_seqlens: Int[Tensor, " boundaries"]
    mask: Bool[Tensor, "1 packed"]
    observations: Bool[Tensor, "1 packed"]  # tokens that the environment wrote after the policy's first turn
    sequence_ids: Int64[Tensor, "1 packed"]
    group_ids: Int64[Tensor, "1 packed"]
    group_tokens: Int64[Tensor, "1 packed"]
    advantages: Float[Tensor, "1 packed"]
    behaviour_logprobs: Float[Tensor, "1 packed"]
    ref_logprobs: Float[Tensor, "1 packed"] | None
    proximal_logprobs: Float[Tensor, "1 packed"] | None
    # Ids of the k tokens that the teacher finds most probable at each position, and their log-probs under the teacher
    teacher_top_ids: Int64[Tensor, "packed k"] | None = None
    teacher_top_logprobs: Float[Tensor, "1 packed k"] | None = None
    members: Int64[Tensor, "1 packed"] | None
    times: Int[Tensor, "1 packed"] | None
    allowed: AllowedTokens | None
    images: tuple[tuple[ImageReference, ...], ...]
    # Tensors made of the images for the policy's vision tower; `Objective.forward` computes them at its first call
    image_inputs: ImageInputs | None = None
    # Set if the policy draws; see `MicroBatch.latents`
    latents: Float[Tensor, "packed states channels height width"] | None
    conditions: tuple[tuple[np.ndarray, ...], ...]  # embeddings of each sequence's prompt, or ()

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        def row(values: np.ndarray) -> Tensor:
            return torch.tensor(values, device=device)[None]

        def optional_row(values: np.ndarray | None) -> Tensor | None:
            return None if values is None else row(values)

        is_trained = batch.loss_mask.copy()
        # The first token of a sequence cannot be trained on, because no token before it predicts it
        first_tokens = batch.cu_seqlens[:-1]
        is_trained[first_tokens] = False
        sequence_ids = batch.sequence_ids()

        self.input_ids = torch.tensor(batch.input_ids, dtype=torch.int64, device=device)  # (N,)
        self.cu_seqlens = torch.tensor(batch.cu_seqlens)  # (S + 1,)
        self.mask = row(is_trained)
        self.observations = row(observation_mask(batch, is_trained))
        self.sequence_ids = row(sequence_ids)
        self.group_ids = row(batch.group_ids[sequence_ids])
        self.group_tokens = row(batch.group_tokens[sequence_ids])
        self.advantages = row(batch.advantages)
        self.behaviour_logprobs = row(batch.behaviour_logprobs)
        self.ref_logprobs = optional_row(batch.ref_logprobs)
        self.proximal_logprobs = optional_row(batch.proximal_logprobs)
        if batch.teacher_top is not None:
            # If the teacher returned fewer than k tokens, the rest has log-prob NaN and is ignored. Its ids may be NaN,
            # so replace them by 0, a valid index
            top_ids = np.nan_to_num(batch.teacher_top[:, 0])
            self.teacher_top_ids = torch.tensor(top_ids, dtype=torch.int64, device=device)
            self.teacher_top_logprobs = row(batch.teacher_top[:, 1])
        # Index of each token's sample in its group, and index of each token in its trajectory, in the order of time
        self.members = None if batch.members is None else row(batch.members[sequence_ids])
        self.times = optional_row(batch.times)
        self.allowed = batch.allowed  # the tokens among which each token was sampled
        self.images = batch.images  # the images of each sequence
        self.conditions = batch.conditions
        self.latents = None if batch.latents is None else torch.tensor(batch.latents, device=device)
        if batch.first_pass is not None:
            self.start_logprobs = row(batch.first_pass.logprobs)
            self.returns = optional_row(batch.first_pass.returns)
            self.old_values = optional_row(batch.first_pass.values)
            if batch.first_pass.advantages is not None:
                self.advantages = row(batch.first_pass.advantages)

    def leave_out_unknown_teacher_tokens(self, vocab_size: int) -> None:
        """Set the teacher's log-probs to NaN for tokens that the policy does not have. The loss then ignores these tokens.

        The vocabulary of a teacher may be larger than that of the policy.

        Args:
            vocab_size: Number of tokens that the policy's output head knows.
        """
        if self.teacher_top_ids is None or self.teacher_top_logprobs is None:
            return
        is_known = (self.teacher_top_ids >= 0) & (self.teacher_top_ids < vocab_size)
        self.teacher_top_ids = torch.where(is_known, self.teacher_top_ids, 0)
        self.teacher_top_logprobs = torch.where(is_known[None], self.teacher_top_logprobs, torch.nan)

    @property
    def is_repeated(self) -> bool:
        """Return whether an earlier pass has trained on this micro-batch."""
        return self.start_logprobs is not None
