"""The start-up self-test's weights: every tensor visibly different from the checkpoint's, then put back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

FLOOR = 0.1  # smallest noise, so that zero biases and all-one norms change as visibly as matrices do


@contextmanager
def perturbed(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Add noise of half its own size to every parameter (shards included) while the block runs.

    An engine that loses one of the tensors then computes visibly other log-probs, whatever the learning rate would
    have hidden. The originals are kept aside: at start, before the optimizer's state exists, there is room for them.
    """
    originals = [local(parameter).clone() for parameter in model.parameters()]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter in map(local, model.parameters()):
                size = parameter.float().pow(2).mean().sqrt() if parameter.numel() else torch.zeros(())
                scale = max(0.5 * float(size), FLOOR)
                noise = torch.randn(parameter.shape, generator=generator) * scale
                parameter.add_(noise.to(parameter.device, parameter.dtype))
        yield
    finally:
        with torch.no_grad():
            for parameter, original in zip(map(local, model.parameters()), originals, strict=True):
                parameter.copy_(original)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter (the parameter itself when it is not sharded)."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
