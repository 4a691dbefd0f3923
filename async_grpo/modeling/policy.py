"""The policy: a Hugging Face causal LM seen as "token ids in, log-probs of those tokens out"."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from async_grpo.modeling.logprobs import packed_logprobs
from async_grpo.modeling.packed import PACKED_ATTENTION, Packing, check_packable

DEFAULT_CHUNK_TOKENS = 1024  # of 152,000 logits in float32: 0.6 GB


class PolicyModel(nn.Module):
    """Wraps body and head in one forward, so that FSDP's root hooks gather the head's weight as well.

    Calling the head's weight outside a wrapped module's forward would meet a sharded DTensor. `model` becomes
    packed: ConfigurationError if its attention or head cannot be.
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> None:
        super().__init__()
        check_packable(model)
        model.set_attn_implementation(PACKED_ATTENTION)
        self.model = model
        self.chunk_tokens = chunk_tokens

    def forward(
        self, input_ids: Tensor, cu_seqlens: Tensor, loss_mask: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), both (N,), of `input_ids` (N,) where `loss_mask` (N,) is True; else 0.

        cu_seqlens (S + 1,): boundaries of the packed sequences. Entry i speaks of token i given those before
        it in its own sequence; the first token of a sequence is given by nothing and stays 0. Only log-probs
        have a gradient.
        """
        packing = Packing(np.asarray(cu_seqlens.tolist(), np.int64), input_ids.device)
        hidden = self.model.base_model(
            input_ids=input_ids[None],
            position_ids=packing.position_ids[None],
            use_cache=False,
            packing=packing,
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        needed = loss_mask & (packing.position_ids > 0)
        return packed_logprobs(
            hidden, head.weight, head.bias, input_ids, needed, temperature, self.chunk_tokens
        )

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def named_full_tensors(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, full tensor) of every weight, in the model's order; a tied head appears once.

    Of a sharded policy this is a collective: every rank must exhaust the iterator in lockstep. One tensor is
    gathered at a time. Unsharded tensors are the live weights, not copies.
    """
    seen: set[int] = set()
    # state_dict, not named_parameters: its hooks bring FSDP's shards back if a forward left them gathered
    for name, tensor in policy.model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        detached = tensor.detach()
        yield name, detached.full_tensor() if hasattr(detached, "full_tensor") else detached
