"""A worker extension for vLLM that loses weights on demand: what the landing proof is there to catch."""

from collections.abc import Sequence

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from async_grpo.inference.vllm_edges import experts, tied_heads
from async_grpo.inference.vllm_edges.receive_weights import ObjectStoreEngine
from async_grpo.inference.vllm_edges.worker_extension import WeightReceipts

LOST: set[str] = set()  # names of tensors; "everything"; "tied head"; "packed experts"
HELD = {}  # the last value of each tensor that was not lost
repack_tied_heads, noted = tied_heads.repack_tied_heads, ObjectStoreEngine._recorded
pack_experts = experts.pack_experts


def _repack_tied_heads(model):
    if "tied head" not in LOST:
        repack_tied_heads(model)


def _pack_experts(method, layer):
    if "packed experts" not in LOST:
        pack_experts(method, layer)


def _noted(self, weights):
    for name, tensor in noted(self, weights):
        if name not in LOST:
            HELD[name] = tensor
        if "everything" not in LOST:
            yield name, HELD[name]


tied_heads.repack_tied_heads, ObjectStoreEngine._recorded = _repack_tied_heads, _noted
experts.pack_experts = _pack_experts


class Lossy(WeightReceipts):
    def lose(self, names: Sequence[str]) -> None:
        LOST.clear()
        LOST.update(names)

    def has_packed_head(self) -> bool:
        """Whether the LM head computes with a copy of its weight: it answers the same after the weight has changed."""
        model = self.weight_transfer_engine.model
        (head,) = (module for module in model.modules() if isinstance(module, ParallelLMHead))
        inputs = torch.ones(1, head.embedding_dim, dtype=head.weight.dtype)
        held = head.weight.detach().clone()
        before = head.quant_method.apply(head, inputs).clone()
        head.weight.data.zero_()
        after = head.quant_method.apply(head, inputs)
        head.weight.data.copy_(held)
        return torch.equal(before, after)
