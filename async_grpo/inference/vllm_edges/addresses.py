"""Refuse an update that moves weights away from the addresses at which captured CUDA graphs read them.

Written for vLLM 0.31 and 0.32. A captured graph of a decode step reads its weights at fixed addresses. vLLM's layerwise
reload copies new weights to their old addresses, but a tensor that a layer derives from its weights after loading (the
split projections of MLA attention, the scales of quantized experts) may be a new tensor after each update. The graphs
would continue to read the old tensor. The canary, which is a prefill, and the fingerprints, which are read through the
layers' attributes, do not show this. vLLM has no public check.

Not needed any more when vLLM's reload keeps or checks the addresses of all tensors that its graphs read.
"""

from typing import Any

import torch
from vllm.config import CUDAGraphMode

NUM_NAMES = 5  # maximum number of moved tensors that the error names


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Return the addresses of all tensors that the layers hold: parameters, buffers and other attributes."""
    address_by_name: dict[str, int] = {}
    for path, layer in model.named_modules():
        attributes = {**layer._parameters, **layer._buffers, **vars(layer)}
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                address_by_name[f"{path}.{name}"] = value.data_ptr()
    return address_by_name


def uses_graphs(config: Any) -> bool:
    """Return whether an engine with this `VllmConfig` captures CUDA graphs."""
    has_gpu = config.device_config.device_type != "cpu"
    return has_gpu and config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def refuse_moved(before: dict[str, int], after: dict[str, int]) -> None:
    """Compare the addresses before and after an update.

    Raises:
        RuntimeError: Tensors have moved. The message names the first of them.
    """
    moved = [name for name, address in before.items() if after.get(name) != address]
    if moved:
        names = ", ".join(moved[:NUM_NAMES])
        raise RuntimeError(
            f"the update moved {len(moved)} of {len(before)} tensors of the engine ({names}): its captured CUDA graphs "
            "would go on with the old weights. Generate without graphs: --enforce-eager"
        )
