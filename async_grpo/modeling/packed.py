"""Packed, padding-free attention: S sequences end to end in one row of N tokens, blind to each other.

Registered as an attention implementation of transformers, which builds no mask for it: the block-diagonal structure
comes from the `Packing` among the model's keyword arguments. Cost grows with the sum of the squared lengths.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_grpo.errors import ConfigurationError

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:  # optional: needs a GPU tool-chain to build; torch's own kernel serves without it
    flash_attn_varlen_func = None

PACKED_ATTENTION = "async_grpo_packed"
# Arguments of an attention call that do not change what it computes, or that packed attention reads itself. All others
# do: a window, a cap, sinks, the indices of a sparse attention, and whatever a newer model invents
HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position",
        "cu_seqlens",
        "deterministic",
        "dropout",
        "hidden_states",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
MOST_ROWS = 0.9  # of a row's tokens: where more are distinct, all are computed


class Packing:
    """Where the sequences of one packed row begin and end, and what of it is computed: equal beginnings only once.

    input_ids (N,); cu_seqlens (S + 1,): 0 ... N. Of these, F tokens are inputs: not the last one of a sequence, which
    nothing follows (unless it is the only one). In a causal model a token's states hang on the tokens up to it alone. So
    the inputs share M rows of states, one for every distinct beginning of a sequence: the members of a group share
    those of their prompt. Attention is computed over all F.
    """

    def __init__(self, input_ids: Tensor, cu_seqlens: Tensor) -> None:
        bounds, device = cu_seqlens.cpu().numpy().astype(np.int64), input_ids.device
        lengths = np.maximum(np.diff(bounds) - 1, 1)
        boundaries = np.cumsum([0, *lengths])
        offsets = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], lengths)
        inputs = np.repeat(bounds[:-1], lengths) + offsets
        rows = rows_of_beginnings(input_ids.cpu().numpy()[inputs], boundaries)
        # Few equal beginnings do not pay for bringing states together and apart in every layer
        self.shares = bool(rows.max() < MOST_ROWS * len(rows))
        if not self.shares:
            rows = np.arange(len(rows))
        firsts = np.unique(rows, return_index=True)[1]
        rows_of_tokens = np.zeros(bounds[-1], np.int64)
        rows_of_tokens[inputs] = rows
        self.longest = int(lengths.max())
        self.boundaries = torch.tensor(boundaries, dtype=torch.int32, device=device)
        self.starts, self.lengths = self.boundaries[:-1], self.boundaries.diff()
        indices = partial(torch.tensor, device=device)  # int64
        self.rows = indices(rows)  # (F,): of each input
        self.rows_of_tokens = indices(rows_of_tokens)  # (N,); 0 where a token is no input
        self.firsts = indices(firsts)  # (M,): the first input of a row
        self.tokens = indices(inputs[firsts])  # (M,): the same, among all N
        self.position_ids = indices(offsets[firsts])  # (M,), from 0 in every sequence

    @cached_property
    def buckets(self) -> list[Tensor]:
        """Rows of states (n, P) of each set of n sequences that share one attention call without the kernel.

        P is the length rounded up to eighths of the next power of two, and to 16 at least: few calls, little
        filling. The filling repeats the last token: no real token looks at it, attention being causal.
        """
        eighth = (2 ** (self.lengths.log2().ceil() - 3)).clamp(min=16).int()
        widths = (self.lengths + eighth - 1) // eighth * eighth
        buckets = []
        for width in widths.unique():
            offsets = torch.arange(int(width), device=widths.device)
            members = (widths == width).nonzero()
            buckets.append(self.rows[self.starts[members] + offsets.minimum(self.lengths[members] - 1)])
        return buckets

    @cached_property
    def places(self) -> Tensor:
        """(M,) int64: the first place of each row in the concatenated outputs of the buckets, before its fillings."""
        rows = torch.cat([index.flatten() for index in self.buckets])
        places = torch.arange(len(rows), device=rows.device)
        return torch.empty_like(self.firsts).scatter_reduce(0, rows, places, "amin", include_self=False)


def rows_of_beginnings(input_ids: np.ndarray, cu_seqlens: np.ndarray) -> np.ndarray:
    """(N,) int64, from 0 without gaps: tokens have one row if they and all before them in their sequences are equal.

    >>> rows_of_beginnings(np.array([5, 6, 7, 5, 6, 8, 6, 7]), np.array([0, 3, 6, 8])).tolist()
    [0, 1, 2, 0, 1, 3, 4, 5]
    """
    sequences = np.split(input_ids, cu_seqlens[1:-1])
    rows = np.split(np.empty(len(input_ids), np.int64), cu_seqlens[1:-1])
    before, rows_before, count = input_ids[:0], input_ids[:0], 0
    # Sorted, whichever way tokens are compared, each sequence has its longest known beginning from its neighbour
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes()):
        shortest = min(len(before), len(sequences[i]))
        differs = np.append(before[:shortest] != sequences[i][:shortest], True)
        shared = int(differs.argmax())
        rows[i][:shared] = rows_before[:shared]
        new = rows[i][shared:]
        new[:] = np.arange(count, count + len(new))
        before, rows_before, count = sequences[i], rows[i], count + len(new)
    return np.concatenate(rows)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute causal attention within sequences; query (1, H, M, D), key and value (1, K, M, D) -> (1, M, H, D).

    ConfigurationError: the model asks for something else, which would be left out silently.
    """
    unsupported = _unsupported_requests(module, attention_mask, kwargs)
    if packing is None:
        unsupported.append("attention that is not told where sequences begin")
    if unsupported or packing is None:
        raise ConfigurationError(
            f"packed attention does not support what {type(module).__name__} asks for: {', '.join(unsupported)}; "
            "train a model with plain causal attention (docs/models.md lists families)"
        )
    heads = (query[0], key[0], value[0])
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        q, k, v = (one.transpose(0, 1) for one in heads)
        if not packing.shares:
            return _attend_with_kernel(q, k, v, packing, scaling)[None], None
        q, k, v = (one.index_select(0, packing.rows) for one in (q, k, v))
        return _attend_with_kernel(q, k, v, packing, scaling).index_select(0, packing.firsts)[None], None
    outputs = []
    for index in packing.buckets:
        found = (one.index_select(1, index.flatten()) for one in heads)
        q, k, v = (one.unflatten(1, index.shape).transpose(0, 1) for one in found)
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.places)[None], None


def _unsupported_requests(
    module: nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, object]
) -> list[str]:
    """Name everything that a model asks of its attention and that the packed one does not compute."""
    unknown = arguments.keys() - HARMLESS_ARGUMENTS
    unsupported = [name for name in sorted(unknown) if arguments[name] is not None]
    if attention_mask is not None:
        unsupported.append("a mask of its own")
    if arguments.get("is_causal", getattr(module, "is_causal", True)) is False:
        unsupported.append("attention to later tokens (is_causal False)")
    if arguments.get("dropout"):
        unsupported.append(f"dropout {arguments['dropout']}")
    return unsupported


def _attend_with_kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None
) -> Tensor:
    """(N, heads, D) each, in half precision on a GPU."""
    longest, bounds = packing.longest, packing.boundaries
    given = query, key, value, bounds, bounds, longest, longest
    if flash_attn_varlen_func is not None:
        return flash_attn_varlen_func(*given, softmax_scale=scaling, causal=True)
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": True, "window_size": (-1, 0)}  # causal
    attended = varlen_attn(*given, **options)
    assert isinstance(attended, Tensor)  # a pair only where the normalisers are asked for
    return attended


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)


def compile_around_attention(layers: Sequence[nn.Module]) -> None:
    """torch.compile the layers' forwards, once for all of one kind and any number of tokens."""
    # How sequences lie differs in every batch: traced, it would be compiled anew for each
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    for layer in layers:
        # Not layer.compile(), which would trace the hooks of FSDP as well
        layer.forward = torch.compile(layer.forward, dynamic=True)
