"""The policy as a network: loading a Hugging Face causal LM, its packed forward, its log-probs, its sharded weights."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_shard(weight: Tensor) -> Tensor:
    """This rank's part of a (possibly sharded) weight: a view, so writing to it writes to the weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def full_tensor(weight: Tensor) -> Tensor:
    """The whole of a weight: of a sharded one it is gathered (a collective), another is returned as it is."""
    detached = weight.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached
