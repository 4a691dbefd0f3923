"""Which weights the layers of an engine compute with, whatever copy of them they packed.

Written for vLLM 0.31 and 0.32. vLLM's own `AsyncLLM.compute_weight_checksums` (0.32) hashes the parameters that a layer
holds. On the CPU a layer that packed its weight holds an empty parameter, so the checksum is the same before and after
every update; and on a GPU it copies all weights to the host. This module asks the layers themselves instead: it calls the
`apply` of their quantization method, and knows how vLLM splits layers over processes (`input_size_per_partition`, ...).

Not needed any more when vLLM's checksums see packed weights, and cost little.
"""

from collections import Counter
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import (
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from async_grpo.weights.read_back import fingerprint, place_of, sampled, sampled_columns


def fingerprints_in_use(model: torch.nn.Module) -> dict[str, int]:
    """Return the fingerprints, by place, of the weights that the layers of this process compute with.

    Of weights that are split over processes, it is the share of this process; weights that all processes hold count in the
    first process only. A tied head has the name of the tensor that it is tied to as its place.
    """
    totals = Counter[str]()
    owners: dict[int, str] = {}  # address of a weight -> its first name
    for path, layer in model.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            full_name = f"{path}.{name}"
            owner = owners.setdefault(weight.data_ptr() or id(weight), full_name)
            place = place_of(owner) if owner == full_name else owner
            totals[place] += fingerprint(_compared_values(layer, name, weight))
    return {place: total % 2**64 for place, total in totals.items()}


def _compared_values(layer: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the values of a weight that are compared, as the layer computes with them; zeros if none are.

    Zeros add nothing to a fingerprint.
    """
    rank = get_tensor_model_parallel_rank()
    is_row = isinstance(layer, RowParallelLinear)
    may_split = isinstance(layer, (LinearBase, VocabParallelEmbedding))
    is_split = may_split and not isinstance(layer, ReplicatedLinear)
    if rank and (not is_split or (is_row and name == "bias")):
        return weight.new_zeros(1)
    multiplies = isinstance(layer, (LinearBase, ParallelLMHead))
    if name != "weight" or not multiplies:
        return sampled(weight)
    method = getattr(layer, "quant_method", None)
    if not isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
        # A quantised layer computes with other numbers than those it received
        return weight.new_zeros(1)
    width = layer.input_size if isinstance(layer, LinearBase) else layer.embedding_dim
    width_here = layer.input_size_per_partition if is_row else width
    first_column = rank * width_here if is_row else 0
    columns = sampled_columns(width) - first_column
    inputs = torch.zeros(len(columns), width_here, dtype=weight.dtype, device=weight.device)
    for row, column in enumerate(columns.tolist()):
        # If the columns of a matrix are split, this process holds only some of them
        if 0 <= column < width_here:
            inputs[row, column] = 1
    return method.apply(layer, inputs, None)
