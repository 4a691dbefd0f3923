"""Packed attention: sequences follow each other without padding, and do not attend to each other.

It is registered as an attention implementation of transformers. transformers builds no mask for it. Instead, the caller
of the model passes a `Packing`, which says where each sequence begins. The cost grows with the sum of the squared
lengths of the sequences.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
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
except ImportError:  # flash-attn is optional; without it, torch's own kernel is used
    flash_attn_varlen_func = None

PACKED_ATTENTION = "async_grpo_packed"
# Arguments of an attention call that do not change its result, or that packed attention supports. All others are
# refused, because they may change the result: a window, a cap, sinks, indices of a sparse attention, and so on
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
# Hidden states of equal beginnings are computed only once if the number of distinct states is below this fraction of
# the number of inputs
MOST_ROWS = 0.9


class Packing:
    """The layout of packed sequences, in which equal beginnings are computed only once.

    F of the N tokens are inputs of the model: all except the last token of each sequence, which predicts nothing. (A
    sequence of one token has this token as input.) In a causal model, the hidden state of a token depends only on this
    token and the tokens before it. So two tokens have equal states if they and all tokens before them are equal. Only
    the M distinct states are computed; they are called rows. For example, the members of a group share the rows of
    their prompt. Attention is computed over all F inputs.

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
        # If few beginnings are equal, gathering the states in every layer costs more than it saves
        self.shares = bool(rows.max() < MOST_ROWS * len(rows))
        if not self.shares:
            rows = np.arange(len(rows))
        firsts = np.unique(rows, return_index=True)[1]
        rows_of_tokens = np.zeros(bounds[-1], np.int64)
        rows_of_tokens[inputs] = rows

        device = input_ids.device
        indices = partial(torch.tensor, device=device)  # makes an int64 tensor from an int64 array
        self.longest = int(lengths.max())
        self.boundaries = torch.tensor(boundaries, dtype=torch.int32, device=device)
        self.starts = self.boundaries[:-1]
        self.lengths = self.boundaries.diff()
        self.rows = indices(rows)  # (F,): row of each input
        # (N,): row of each token; 0 for a token that is not an input of the model
        self.rows_of_tokens = indices(rows_of_tokens)
        # The inputs with equal states share a row. The first of them is the one that is computed
        self.firsts = indices(firsts)  # (M,): index of each row's first input among the F inputs
        self.tokens = indices(inputs[firsts])  # (M,): index of each row's first input among the N tokens
        self.position_ids = indices(offsets[firsts])  # (M,): position of each row in its sequence, from 0

    @cached_property
    def buckets(self) -> list[Int64[Tensor, "_sequences _width"]]:
        """Return buckets of sequences of similar length, for attention without a GPU kernel: one call for each bucket.

        A bucket is a table with one line for each of its sequences: the rows of the sequence's tokens, padded to the
        width of the bucket. To get few calls and little padding, lengths are rounded up to a multiple of 1/8 of the
        next power of two, or of 16 for short sequences. The padding repeats the last token. No real token attends to
        the padding, because attention is causal.
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
        """Return for each row the index at which it first occurs in the concatenated outputs of all buckets."""
        rows = torch.cat([index.flatten() for index in self.buckets])
        places = torch.arange(len(rows), device=rows.device)
        return torch.empty_like(self.firsts).scatter_reduce(0, rows, places, "amin", include_self=False)


def rows_of_beginnings(
    input_ids: Int[np.ndarray, " tokens"], cu_seqlens: Int[np.ndarray, " boundaries"]
) -> Int64[np.ndarray, " tokens"]:
    """Return the row number of each token, from 0 without gaps.

    Two tokens share a row if they are equal, and if all tokens before them in their sequences are equal.

    >>> rows_of_beginnings(np.array([5, 6, 7, 5, 6, 8, 6, 7]), np.array([0, 3, 6, 8])).tolist()
    [0, 1, 2, 0, 1, 3, 4, 5]
    """
    sequences = np.split(input_ids, cu_seqlens[1:-1])
    rows = np.split(np.empty(len(input_ids), np.int64), cu_seqlens[1:-1])
    previous = rows_of_previous = input_ids[:0]
    num_rows = 0
    # In lexicographic order, the longest beginning that a sequence shares with any earlier one is that with the
    # sequence directly before it. So comparing neighbors suffices
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
    """Compute causal attention within each of the packed sequences.

    The axis `rows` has the M distinct states of `Packing`.

    Args:
        module: The attention layer.
        query: The queries of the distinct states.
        key: The keys of the distinct states. Several heads of queries may share one head of keys and values.
        value: The values of the distinct states.
        attention_mask: Must be None.
        packing: The layout of the packed sequences.
        scaling: Factor by which the products of queries and keys are multiplied.
        kwargs: Further arguments that the model passes to its attention.

    Returns:
        The output of each row, and None in place of attention weights.

    Raises:
        ConfigurationError: The model requests something that packed attention does not support.
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
    """Return the states of each sequence, selected by the sequence's rows."""
    return states.index_select(1, rows.flatten()).unflatten(1, rows.shape).transpose(0, 1)


def _unsupported_requests(
    module: nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, object]
) -> list[str]:
    """Return descriptions of the features that the model requests and that packed attention does not support."""
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
    """Return the output of attention, computed by a GPU kernel for half precision."""
    boundaries = packing.boundaries
    longest = packing.longest
    inputs = (query, key, value, boundaries, boundaries, longest, longest)
    if flash_attn_varlen_func is not None:
        return flash_attn_varlen_func(*inputs, softmax_scale=scaling, causal=True)
    output = varlen_attn(*inputs, scale=scaling, **varlen_options(varlen_attn))
    assert isinstance(output, Tensor)  # varlen_attn returns a pair only if softmax normalisers are requested
    return output


@cache
def varlen_options(kernel: Callable[..., Any], window_tokens: int = -1) -> dict[str, Any]:
    """Return the options with which torch's `varlen_attn` computes causal attention with grouped heads.

    Args:
        kernel: The `varlen_attn` of the installed torch. In torch 2.11 it has no option `enable_gqa`, and always
            accepts grouped heads.
        window_tokens: Number of earlier tokens that a token attends to; -1 for all.

    >>> def kernel_of_2_11(query, key, value, *, scale=None, window_size=(-1, -1)): ...
    >>> varlen_options(kernel_of_2_11)
    {'window_size': (-1, 0)}
    """
    options: dict[str, Any] = {"window_size": (window_tokens, 0)}
    if "enable_gqa" in inspect.signature(kernel).parameters:
        options["enable_gqa"] = True
    return options


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, packed_attention)


def compile_around_attention(layers: Sequence[nn.Module]) -> None:
    """Compile the forward of each layer, except its attention.

    Layers of the same kind share the compiled code, which is valid for any number of tokens.
    """
    # Do not compile packed attention: the layout of the sequences differs in every batch, so it would be compiled again
    # in every batch
    ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    for layer in layers:
        # Do not use layer.compile(), because it would also compile the hooks of FSDP
        layer.forward = torch.compile(layer.forward, dynamic=True)
