"""A micro-batch as tensors on the trainer's device."""

import numpy as np
import torch
from torch import Tensor

from async_grpo.types import MicroBatch


class BatchTensors:
    """One packed row, (1, N) each; `mask` leaves out the first token of every sequence, which nothing predicts."""

    def __init__(self, batch: MicroBatch, device: torch.device) -> None:
        def row(values: np.ndarray) -> Tensor:
            return torch.tensor(values, device=device)[None]

        trained = batch.loss_mask.copy()
        trained[batch.cu_seqlens[:-1]] = False
        ids = batch.sequence_ids()
        self.input_ids = torch.tensor(batch.input_ids, dtype=torch.int64, device=device)
        self.cu_seqlens = torch.tensor(batch.cu_seqlens)
        self.mask = row(trained)
        self.sequence_ids = row(ids)
        self.group_ids = row(batch.group_ids[ids])
        self.group_tokens = row(batch.group_tokens[ids])
        self.advantages = row(batch.advantages)
        self.behaviour_logprobs = row(batch.behaviour_logprobs)
        self.ref_logprobs = None if batch.ref_logprobs is None else row(batch.ref_logprobs)
        self.proximal_logprobs = None if batch.proximal_logprobs is None else row(batch.proximal_logprobs)
