"""Compute the largest possible micro-batch once before the first step, so that a lack of memory shows at once.

The micro-batches of a run differ in size. Without the trial, the largest one may come after hours, when completions
have become longer. The trial makes the optimizer's moments first: they are otherwise made at the end of the first step,
so a lack of memory for them would show only at the second step.
"""

import logging
import time

import numpy as np
import torch

from async_grpo.errors import OutOfMemory
from async_grpo.experience.config import BatchConfig
from async_grpo.messages import MicroBatch
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.batch_tensors import BatchTensors

log = logging.getLogger(__name__)


def try_largest(
    accumulator: GradientAccumulator, vocab_size: int, config: BatchConfig, max_total_tokens: int
) -> None:
    """Run forward and backward of the largest micro-batch that the run can have, and discard the gradient. A collective.

    Neither the weights nor the random state nor the metrics of the first step change.

    Args:
        accumulator: The accumulator of this rank, before its first step.
        vocab_size: Number of token ids.
        config: The options that limit the size of a micro-batch.
        max_total_tokens: Maximum number of tokens of a sequence.

    Raises:
        OutOfMemory: The micro-batch, together with the moments, does not fit into the memory.
    """
    begin = time.perf_counter()
    accumulator.make_moments()
    micro_batch = largest_micro_batch(config, vocab_size, max_total_tokens)
    batch = BatchTensors(micro_batch, accumulator.policy.device)
    _add_step_terms(batch)
    steps_done = accumulator.steps
    if accumulator.critic is not None:
        # Steps that train only the critic need less memory than later ones, so pretend to be past them
        accumulator.steps = max(steps_done, accumulator.critic.warmup_steps)
    try:
        accumulator.compute_gradient(batch)
    except OutOfMemory as error:
        raise OutOfMemory(
            "the largest micro-batch that this run may have does not fit (tried before the first step; --no-longest-first "
            f"starts without the trial): {error}"
        ) from error
    finally:
        accumulator.steps = steps_done
    accumulator.discard_gradients()
    log.info(
        "the largest possible micro-batch, of %d tokens, fits: tried in %.1f s (--longest-first)",
        len(micro_batch.input_ids),
        time.perf_counter() - begin,
    )


def largest_micro_batch(config: BatchConfig, vocab_size: int, max_total_tokens: int) -> MicroBatch:
    """Return a micro-batch of as many tokens as a rank can get, in sequences that are as long as possible.

    Args:
        config: The options that limit the size of a micro-batch.
        vocab_size: Number of token ids.
        max_total_tokens: Maximum number of tokens of a sequence.
    """
    longest = min(max_total_tokens, config.max_tokens_per_gpu)
    num_tokens = min(config.max_tokens_per_gpu, config.samples_per_step * longest)
    ends = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
    num_sequences = len(ends) - 1
    positions = np.arange(num_tokens)
    zeros = np.zeros(num_tokens, np.float32)
    return MicroBatch(
        # Give each sequence another first token. Sequences with equal beginnings share their computation, and would
        # need less memory
        input_ids=((positions % longest + positions // longest) % vocab_size).astype(np.int32),
        cu_seqlens=ends,
        loss_mask=np.ones(num_tokens, bool),
        behaviour_logprobs=zeros,
        advantages=zeros,
        versions=np.zeros(num_tokens, np.int32),
        group_ids=np.arange(num_sequences, dtype=np.int64),
        group_tokens=np.full(num_sequences, longest, np.int64),
        ref_logprobs=zeros,
        proximal_logprobs=zeros,
    )


def _add_step_terms(batch: BatchTensors) -> None:
    """Set the fields that `whole_step` computes for some objectives, to dummy values of the right size."""
    batch.returns = torch.zeros_like(batch.advantages)
    batch.old_values = torch.zeros_like(batch.advantages)
    batch.selected = torch.zeros_like(batch.mask)
    batch.weight_mean = 1.0
    batch.kept = batch.mask
