"""Packed, padding-free attention: S sequences end to end in one row of N tokens, blind to each other.

Registered as an attention implementation of transformers, so every dense decoder that uses the attention
interface works unchanged. transformers builds no mask for an implementation without a mask function; the
block-diagonal structure comes from the `Packing` that is passed through the model's keyword arguments
instead. Cost grows with the sum of the squared lengths, never with N squared.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_grpo.errors import ConfigurationError

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:  # optional: needs a GPU tool-chain to build; torch's own kernel serves without it
    flash_attn_varlen_func = None

PACKED_ATTENTION = "async_grpo_packed"


@dataclass(frozen=True)
class Packing:
    """Where the sequences of one packed row begin and end; `cu_seqlens` (S + 1,) int32: 0 ... N."""

    cu_seqlens: np.ndarray
    device: torch.device

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.cu_seqlens)

    @cached_property
    def boundaries(self) -> Tensor:
        """`cu_seqlens` on the device, as the variable-length kernels want it."""
        return torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self.device)

    @cached_property
    def position_ids(self) -> Tensor:
        """(N,) int64, counting from 0 in every sequence."""
        starts = np.repeat(self.cu_seqlens[:-1], self.lengths)
        return torch.tensor(np.arange(len(starts)) - starts, dtype=torch.int64, device=self.device)

    @cached_property
    def buckets(self) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """(padded length P, token index (n * P,)) of each set of n sequences that share one attention call;
        and (N,) int64: the row of each token in the concatenated outputs of the calls.

        A short sequence is filled up by repeating its last token. That is exact: attention is causal, so no
        real token looks at the filling, and the filling's own outputs are never read.
        """
        padded, starts, calls, rows = bucket_length(self.lengths), self.cu_seqlens[:-1], [], 0
        places = np.empty(self.cu_seqlens[-1], np.int64)
        for width in np.unique(padded).tolist():
            members = padded == width
            offsets = np.minimum(np.arange(width), self.lengths[members, None] - 1)
            index = (starts[members, None] + offsets).ravel()
            is_real = (np.arange(width) < self.lengths[members, None]).ravel()
            places[index[is_real]] = rows + np.flatnonzero(is_real)
            rows += len(index)
            calls.append((width, torch.tensor(index, dtype=torch.int64, device=self.device)))
        return calls, torch.tensor(places, device=self.device)


def bucket_length(lengths: np.ndarray) -> np.ndarray:
    """Lengths rounded up to eighths of the next power of two, and to 16 at least: few calls, little filling.

    >>> bucket_length(np.array([1, 16, 17, 130, 1000]))
    array([  16,   16,   32,  160, 1024])
    """
    eighth = 2 ** np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64) - 3, 4)
    return -(-lengths // eighth) * eighth


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Causal attention within sequences; query (1, H, N, D), key and value (1, K, N, D) -> (1, N, H, D)."""
    refused = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if refused or dropout:
        raise ConfigurationError(
            f"packed attention supports neither dropout ({dropout}) nor {', '.join(refused) or 'windows'}; "
            "train a model with plain causal attention"
        )
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))  # (N, heads, D)
    flash = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    attend = _attend_with_kernel if flash else _attend_in_buckets
    return attend(query, key, value, packing, scaling)[None], None


def _attend_with_kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    longest, bounds = int(packing.lengths.max()), packing.boundaries
    if flash_attn_varlen_func is not None:
        return flash_attn_varlen_func(
            query, key, value, bounds, bounds, longest, longest, softmax_scale=scaling, causal=True
        )
    causal: dict[str, Any] = {"window_size": (-1, 0)}  # unbounded to the left, none to the right
    attended = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scaling, enable_gqa=True, **causal
    )
    assert isinstance(attended, Tensor)  # a pair only where the normalisers are asked for
    return attended


def _attend_in_buckets(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    outputs, (calls, places) = [], packing.buckets
    for width, index in calls:
        q, k, v = (
            heads.index_select(0, index).unflatten(0, (-1, width)).transpose(1, 2)
            for heads in (query, key, value)
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, places)


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)


def check_packable(model: PreTrainedModel) -> None:
    """ConfigurationError unless the model's attention and head are what the packed forward computes."""
    config = model.config.get_text_config()
    if not model._supports_attention_backend:
        raise ConfigurationError(
            f"{type(model).__name__} does not use transformers' attention interface, so it cannot be packed"
        )
    window = getattr(config, "sliding_window", None)
    layers = set(getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding"])
    if layers != {"full_attention"}:
        raise ConfigurationError(
            "packed attention sees a whole sequence, but the model has layers "
            f"{sorted(layers)} and sliding_window {window}; use a model with full attention"
        )
    scaled_head = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")
    found = {name: getattr(config, name, None) for name in scaled_head}
    if changed := {name: value for name, value in found.items() if value not in (None, 1)}:
        raise ConfigurationError(
            f"log-probs here are those of a plain linear head, but the model has {changed}"
        )
    dropouts = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    if rate := max([getattr(config, "attention_dropout", 0.0) or 0.0, *dropouts]):
        raise ConfigurationError(
            f"the model has dropout {rate}: its log-probs would be random; set it to 0 in config.json"
        )
