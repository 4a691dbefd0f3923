"""Fingerprint the weights that an engine's layers compute with, even if these are packed copies.

Written for vLLM 0.31 and 0.32. vLLM's own `AsyncLLM.compute_weight_checksums` (0.32) hashes the parameters of the
layers. On the CPU, a layer that has packed its weight has an empty parameter, so its checksum never changes. On a GPU,
vLLM's method copies all weights to the host. This module calls the layers themselves: it uses the `apply` of their
quantization method, and depends on how vLLM splits layers over processes (`input_size_per_partition`, ...).

Not needed any more when vLLM's checksums include packed weights without copying all weights to the host.
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
    """Return the fingerprints of the weights that this process's layers compute with.

    The keys are places: the module of a weight (`read_back.place_of`), or for a tied head the full name of the tensor
    to which it is tied. If a weight is split over processes, the fingerprint covers only the part of this process. A
    weight that all processes hold is counted in the first process only, so that the fingerprints of all processes add
    up.
    """
    totals = Counter[str]()
    owners: dict[int, str] = {}  # address of a weight -> the first name that it has in the model
    for path, layer in model.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            # In an engine with an adapter, vLLM wraps layers, which then have the name `base_layer`
            full_name = f"{path}.{name}".replace(".base_layer", "")
            owner = owners.setdefault(weight.data_ptr() or id(weight), full_name)
            place = place_of(owner) if owner == full_name else owner
            totals[place] += fingerprint(_compared_values(layer, name, weight))
    return {place: total % 2**64 for place, total in totals.items()}


def _compared_values(layer: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the sampled columns of a weight, with the values that the layer uses in its computation.

    If the weight is not compared in this process, return a zero, which adds nothing to a fingerprint.
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
        # A quantized layer computes with other numbers than it received, so its weight cannot be compared
        return weight.new_zeros(1)
    width = layer.input_size if isinstance(layer, LinearBase) else layer.embedding_dim
    width_here = layer.input_size_per_partition if is_row else width
    first_column = rank * width_here if is_row else 0
    columns = sampled_columns(width) - first_column
    inputs = torch.zeros(len(columns), width_here, dtype=weight.dtype, device=weight.device)
    for row, column in enumerate(columns.tolist()):
        # If the columns of the matrix are split over processes, skip those of other processes
        if 0 <= column < width_here:
            inputs[row, column] = 1
    return method.apply(layer, inputs, None)
