"""Packed attention without padding: S sequences end to end in one row of N tokens, which do not attend to each other.

It is registered as an attention implementation of transformers, which builds no mask for it: the block-diagonal structure
comes from the `Packing` among the model's keyword arguments. The cost grows with the sum of the squared lengths.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from async_grpo.errors import ConfigurationError

try:
    from flash_attn import flash_attn_varlen_func
except ImportError:  # optional: its build needs a GPU tool-chain; otherwise torch's own kernel is used
    flash_attn_varlen_func = None

PACKED_ATTENTION = "async_grpo_packed"
# Arguments of an attention call that do not change its result, or that packed attention reads itself. All others change
# it: a window, a cap, sinks, the indices of a sparse attention, and arguments of future models
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
MOST_ROWS = 0.9  # if a larger share of the tokens is distinct, beginnings are not shared


class Packing:
    """The layout of one packed row, in which equal beginnings of sequences are computed only once.

    F of the N tokens are inputs: all except the last one of each sequence, which no token follows (unless it is the only
    one). In a causal model the states of a token depend only on the tokens up to it. So the inputs share M rows of states,
    one for every distinct beginning of a sequence: the members of a group share the rows of their prompt. Attention is
    computed over all F inputs.

    Args:
        input_ids: The N tokens.
        cu_seqlens: Boundaries of the sequences, 0 ... N.
    """

    def __init__(self, input_ids: Int[Tensor, " packed"], cu_seqlens: Int[Tensor, " boundaries"]) -> None:
        bounds = cu_seqlens.cpu().numpy().astype(np.int64)
        lengths = np.maximum(np.diff(bounds) - 1, 1)
        boundaries = np.cumsum([0, *lengths])
        offsets = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], lengths)
        inputs = np.repeat(bounds[:-1], lengths) + offsets
        rows = rows_of_beginnings(input_ids.cpu().numpy()[inputs], boundaries)
        # With few equal beginnings, the gathering of states in every layer costs more than it saves
        self.shares = bool(rows.max() < MOST_ROWS * len(rows))
        if not self.shares:
            rows = np.arange(len(rows))
        firsts = np.unique(rows, return_index=True)[1]
        rows_of_tokens = np.zeros(bounds[-1], np.int64)
        rows_of_tokens[inputs] = rows

        device = input_ids.device
        indices = partial(torch.tensor, device=device)  # int64
        self.longest = int(lengths.max())
        self.boundaries = torch.tensor(boundaries, dtype=torch.int32, device=device)
        self.starts = self.boundaries[:-1]
        self.lengths = self.boundaries.diff()
        self.rows = indices(rows)  # (F,): row of each input
        self.rows_of_tokens = indices(
            rows_of_tokens
        )  # (N,): row of each token; 0 for a token that is no input
        self.firsts = indices(firsts)  # (M,): first input of each row, among the F inputs
        self.tokens = indices(inputs[firsts])  # (M,): first input of each row, among the N tokens
        self.position_ids = indices(offsets[firsts])  # (M,): position in the sequence, from 0

    @cached_property
    def buckets(self) -> list[Int64[Tensor, "_sequences _width"]]:
        """Return the rows of states for each set of sequences that share one attention call without the kernel.

        The width is the length rounded up to eighths of the next power of two, and at least 16: this needs few calls and
        little padding. The padding repeats the last token; no real token attends to it, because attention is causal.
        """
        eighth = (2 ** (self.lengths.log2().ceil() - 3)).clamp(min=16).int()
        widths = (self.lengths + eighth - 1) // eighth * eighth
        buckets = []
        for width in widths.unique():
            offsets = torch.arange(int(width), device=widths.device)
            members = (widths == width).nonzero()
            inputs = self.starts[members] + offsets.minimum(self.lengths[members] - 1)
            buckets.append(self.rows[inputs])
        return buckets

    @cached_property
    def places(self) -> Int64[Tensor, " rows"]:
        """Return the first place of each row in the concatenated outputs of the buckets."""
        rows = torch.cat([index.flatten() for index in self.buckets])
        places = torch.arange(len(rows), device=rows.device)
        return torch.empty_like(self.firsts).scatter_reduce(0, rows, places, "amin", include_self=False)


def rows_of_beginnings(
    input_ids: Int[np.ndarray, " tokens"], cu_seqlens: Int[np.ndarray, " boundaries"]
) -> Int64[np.ndarray, " tokens"]:
    """Return the row of each token, from 0 without gaps.

    Tokens share a row if they and all tokens before them in their sequences are equal.

    >>> rows_of_beginnings(np.array([5, 6, 7, 5, 6, 8, 6, 7]), np.array([0, 3, 6, 8])).tolist()
    [0, 1, 2, 0, 1, 3, 4, 5]
    """
    sequences = np.split(input_ids, cu_seqlens[1:-1])
    rows = np.split(np.empty(len(input_ids), np.int64), cu_seqlens[1:-1])
    previous = rows_of_previous = input_ids[:0]
    num_rows = 0
    # In any lexicographic order, a sequence shares its longest beginning among the earlier ones with its predecessor
    for i in sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes()):
        sequence = sequences[i]
        shortest = min(len(previous), len(sequence))
        differs = np.append(previous[:shortest] != sequence[:shortest], True)
        num_shared = int(differs.argmax())
        rows[i][:num_shared] = rows_of_previous[:num_shared]
        num_new = len(sequence) - num_shared
        rows[i][num_shared:] = np.arange(num_rows, num_rows + num_new)
        num_rows += num_new
        previous = sequence
        rows_of_previous = rows[i]
    return np.concatenate(rows)


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads rows head_dim"],
    key: Float[Tensor, "1 kv_heads rows head_dim"],
    value: Float[Tensor, "1 kv_heads rows head_dim"],
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Float[Tensor, "1 rows heads head_dim"], None]:
    """Compute causal attention within sequences.

    Args:
        module: The attention layer.
        query: The queries of all rows.
        key: The keys of all rows; a head of them may serve several heads of queries.
        value: The values of all rows.
        attention_mask: Must be None.
        packing: The layout of the row.
        scaling: Factor of the products of queries and keys.
        kwargs: Further arguments of the model.

    Returns:
        The output, and None in place of attention weights.

    Raises:
        ConfigurationError: The model requests anything else, which would otherwise be ignored silently.
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
        q, k, v = (states.transpose(0, 1) for states in heads)
        if not packing.shares:
            return _attend_with_kernel(q, k, v, packing, scaling)[None], None
        q, k, v = (states.index_select(0, packing.rows) for states in (q, k, v))
        output = _attend_with_kernel(q, k, v, packing, scaling)
        return output.index_select(0, packing.firsts)[None], None
    outputs = []
    for rows in packing.buckets:
        q, k, v = (_states_of_rows(states, rows) for states in heads)
        output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packing.places)[None], None


def _states_of_rows(
    states: Float[Tensor, "heads rows head_dim"], rows: Int64[Tensor, "sequences width"]
) -> Float[Tensor, "sequences heads width head_dim"]:
    """Return the states of the rows of each sequence."""
    return states.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1)


def _unsupported_requests(
    module: nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, object]
) -> list[str]:
    """Return the names of everything that a model requests of its attention and that packed attention lacks."""
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
    query: Float[Tensor, "inputs heads head_dim"],
    key: Float[Tensor, "inputs kv_heads head_dim"],
    value: Float[Tensor, "inputs kv_heads head_dim"],
    packing: Packing,
    scaling: float | None,
) -> Float[Tensor, "inputs heads head_dim"]:
    """Return the attention of states in half precision on a GPU."""
    boundaries = packing.boundaries
    longest = packing.longest
    inputs = (query, key, value, boundaries, boundaries, longest, longest)
    if flash_attn_varlen_func is not None:
        return flash_attn_varlen_func(*inputs, softmax_scale=scaling, causal=True)
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": True, "window_size": (-1, 0)}  # causal
    output = varlen_attn(*inputs, **options)
    assert isinstance(output, Tensor)  # it is a pair only if normalisers are requested
    return output


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)


def compile_around_attention(layers: Sequence[nn.Module]) -> None:
    """Compile the forward of each layer, once for all layers of one kind and any number of tokens."""
    # The layout of sequences differs in every batch; if it were traced, every batch would be compiled anew
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    for layer in layers:
        # layer.compile() would trace the hooks of FSDP as well
        layer.forward = torch.compile(layer.forward, dynamic=True)
