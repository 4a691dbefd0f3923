"""`--weight-sync-deltas` for a transport that sends single tensors instead of chunks (NCCL), on both sides.

A tensor travels under a name that tells the receiver what to do with it:

    NAME                        load the tensor, and keep nothing (in a self-test, or without the option)
    KEEP + NAME                 load the tensor, and keep a copy in main memory
    CHANGES + DIGEST:NAME       apply the changes, which are bytes, to the kept tensor with this digest, and load it

Each side computes the digests (`package.tensor_digest`) from the tensors that it has.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from async_grpo.errors import WeightsDidNotLand
from async_grpo.modeling import is_lora_tensor
from async_grpo.weights.changes import apply_changes, encode_changes
from async_grpo.weights.package import tensor_digest
from async_grpo.weights.traffic import Traffic

KEEP = "async_grpo.keep:"
CHANGES = "async_grpo.changes:"


class SentTensors:
    """The tensors of the last version that the trainer sent, in main memory.

    Args:
        traffic: Counts the values that are compared.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._last: dict[str, tuple[int, Tensor]] = {}  # name -> digest and tensor
        self._traffic = traffic

    def has(self, names: Iterable[str]) -> bool:
        """Return whether this trainer has sent each of these tensors before, and kept it."""
        return set(names) <= self._last.keys()

    def keep(self, name: str, tensor: Tensor, digest: int) -> None:
        """Keep a copy of a tensor that is sent."""
        self._last[name] = digest, tensor.detach().to("cpu", copy=True)

    def encode(self, name: str, tensor: Tensor, digest: int) -> tuple[str, Tensor]:
        """Keep a tensor, and return (name, tensor) as they travel. The tensor is in main memory.

        It is either the whole tensor or its changes, whichever is smaller.
        """
        last_digest, last_tensor = self._last[name]
        self.keep(name, tensor, digest)
        _, kept_tensor = self._last[name]
        changes = encode_changes(
            _bytes_of(last_tensor), _bytes_of(kept_tensor), compress=is_lora_tensor(name)
        )
        self._traffic.num_words += kept_tensor.nbytes // 2
        self._traffic.num_changed += changes.num_changed
        if changes.is_worthwhile:
            return f"{CHANGES}{last_digest}:{name}", torch.from_numpy(changes.payload)
        return KEEP + name, kept_tensor


class ReceivedTensors:
    """The tensors of the last version that an engine's process received, in main memory."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, Tensor]] = {}  # name -> digest and tensor

    def restore(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors under their own names.

        Args:
            weights: Tensors as they travelled, on the device of the engine.

        Raises:
            WeightsDidNotLand: The tensor to which changes apply is not here, or the changes are damaged.
        """
        for name, tensor in weights:
            if name.startswith(KEEP):
                own_name = name.removeprefix(KEEP)
                self._last[own_name] = tensor_digest(tensor), tensor.to("cpu", copy=True)
                yield own_name, tensor
            elif name.startswith(CHANGES):
                digest, own_name = name.removeprefix(CHANGES).split(":", 1)
                yield own_name, self._changed(own_name, int(digest), tensor)
            else:
                yield name, tensor

    def _changed(self, name: str, base_digest: int, payload: Tensor) -> Tensor:
        """Return the new tensor on the device of the payload, and keep it."""
        # Remove the tensor first: if the changes are applied only in part because of an error, it must never be used
        # again
        digest, tensor = self._last.pop(name, (None, None))
        if tensor is None or digest != base_digest:
            raise WeightsDidNotLand(
                f"changes of {name} apply to the tensor with digest {base_digest}, but this engine has {digest}: it missed "
                "a version, or a version did not load"
            )
        apply_changes(_bytes_of(tensor), payload.cpu().numpy())
        # Copy the tensor even on a CPU, because the engine may still use it when the next changes are applied
        new_tensor = tensor.to(payload.device, copy=True)
        self._last[name] = tensor_digest(new_tensor), tensor
        return new_tensor


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the bytes (n,) uint8 of a contiguous tensor in main memory, as a view of the same memory."""
    return tensor.view(-1).view(torch.uint8).numpy()
