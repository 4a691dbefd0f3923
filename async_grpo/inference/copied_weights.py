"""Copy received tensors into the weights of an engine whose model is a torch module."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from async_grpo.errors import WeightsDidNotLand
from async_grpo.modeling.policy import named_weights_and_adapters


@torch.no_grad()
def copy_weights(policy: Any, tensors: Mapping[str, Tensor]) -> set[str]:
    """Copy tensors into the weights or adapter matrices of the same names, in a `PolicyModel` or `FlowPolicy`.

    Weights without a tensor keep their values. The manifest does not contain them, so the trainer sees that they were
    not received.

    Returns:
        The names of the tensors that differ in any bit from the weights with which the policy computes afterwards.

    Raises:
        WeightsDidNotLand: A name or a shape is not one of the policy's.
    """
    weights: dict[str, Any] = dict(named_weights_and_adapters(policy))
    for name, tensor in tensors.items():
        if name not in weights or weights[name].shape != tensor.shape:
            expected = tuple(weights[name].shape) if name in weights else "no such tensor"
            raise WeightsDidNotLand(f"received {name} of shape {tuple(tensor.shape)}; expected: {expected}")
        weights[name].copy_(tensor)
    # Read the weights again, because `copy_` may have written to a copy that the forward pass does not use
    used_weights: dict[str, Any] = dict(named_weights_and_adapters(policy))
    differing = set()
    for name, tensor in tensors.items():
        if not torch.equal(used_weights[name], tensor.to(used_weights[name])):
            differing.add(name)
    return differing
