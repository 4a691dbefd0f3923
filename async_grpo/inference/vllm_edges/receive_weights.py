"""Receive weights in the engine: two transports for vLLM's own interface, which record each received tensor.

Written for vLLM 0.31 and 0.32. `WeightTransferEngine` is public, and `register_engine` accepts other packages' classes.
This module uses three private parts:

1. `load_weights` does not report which tensors it received. `Receipts` therefore replaces the engine's model while
   weights are loaded, and sees every tensor.
2. A transport must itself call vLLM's layerwise reload, which is private.
3. The registry of transports is read to see whether a name is registered already.

Not needed any more when vLLM reports the tensors that arrived in an update.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_grpo.inference.vllm_edges import addresses, tied_heads
from async_grpo.inference.vllm_edges.lora_weights import EngineLora
from async_grpo.modeling import is_lora_tensor
from async_grpo.protocols import TensorRecord
from async_grpo.weights.delta_tensors import ReceivedTensors
from async_grpo.weights.package import record
from async_grpo.weights.read_back import fingerprint, sampled

# Silence vLLM's warning about layers that received no weights, because a round of the self-test may send a single
# layer. If weights are lost, the receipts show it.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class Receipts:
    """Mixin for a `WeightTransferEngine`: records received tensors, reloads layer by layer, and updates tied heads.

    While weights are loaded, this object takes the place of the engine's model, so that every tensor passes through it.
    """

    model: Any
    model_config: Any
    vllm_config: Any
    fingerprints: dict[str, int]  # tensor name -> fingerprint of the tensor's last received values
    adapter: EngineLora | None = None  # the policy's adapter; None if whole weights are received

    def start_weight_update(self) -> None:
        """Prepare the model for new weights."""
        self.received: dict[str, TensorRecord] = {}
        self.fingerprints = getattr(self, "fingerprints", {})
        self.received_tensors = getattr(self, "received_tensors", ReceivedTensors())
        # The addresses of tensors that the engine's CUDA graphs read; {} without graphs
        self._addresses = addresses.addresses(self.model) if addresses.uses_graphs(self.vllm_config) else {}
        self._model = self.model
        self._is_reloading = False
        if self.adapter is None:
            self._begin_reload()
        self.model = self

    def _begin_reload(self) -> None:
        """Prepare the layers of the model for new weights, unless this was already done for this update."""
        if not self._is_reloading:
            initialize_layerwise_reload(self._model)
            self._is_reloading = True

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load weights into the model, pass tensors of an adapter to `adapter`, and record every tensor."""
        weights_of_model = self._without_adapter(self._recorded(self.received_tensors.restore(weights)))
        first = next(weights_of_model, None)
        if first is None:
            # Only tensors of an adapter have arrived. Do not prepare the layers of the model, which takes longer
            return set()
        self._begin_reload()
        return self._model.load_weights(chain([first], weights_of_model))

    def _recorded(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, and record each of them."""
        for name, tensor in weights:
            self.received[name] = record(tensor)
            if not is_lora_tensor(name):
                self.fingerprints[name] = fingerprint(sampled(tensor))
            yield name, tensor

    def _without_adapter(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the model, and pass tensors of an adapter to `adapter`.

        Raises:
            RuntimeError: The engine was started without an adapter.
        """
        for name, tensor in weights:
            if not is_lora_tensor(name):
                yield name, tensor
            elif self.adapter is None:
                raise RuntimeError(f"received {name}, but this engine was started without an adapter")
            else:
                self.adapter.receive(name, tensor)

    def finish_weight_update(self) -> None:
        """Finish loading, so that the model computes with the new weights.

        Raises:
            RuntimeError: Weights are no longer where the engine's CUDA graphs read them.
        """
        self.model = self._model
        if not self._is_reloading:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        tied_heads.repack_tied_heads(self.model)
        if self._addresses:
            addresses.refuse_moved(self._addresses, addresses.addresses(self.model))


@contextmanager
def shared_bytes(payload: memoryview | bytes, name: str) -> Iterator[str]:
    """Yield a path at which other processes of this user can open (and mmap) the payload while the block runs.

    If the sender or a receiver is killed, no file remains in /dev/shm.
    """
    with os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "wb") as memory:
        memory.write(payload)
        memory.flush()
        yield f"/proc/{os.getpid()}/fd/{memory.fileno()}"


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """A chunk of weights: the path of a safetensors file that exists only in this machine's memory (`shared_bytes`)."""

    path: str


class ObjectStoreEngine(Receipts, WeightTransferEngine[WeightTransferInitInfo, ObjectStoreUpdate]):
    """Receives weights through Ray's object store, on CPUs and GPUs, across nodes, for any number of engines."""

    init_info_cls = WeightTransferInitInfo  # has no fields, because every chunk names its own path
    update_info_cls = ObjectStoreUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing, because there is no connection to set up."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one chunk. Once this returns, the sender may close its shared memory."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # waits for copies from the shared memory to end

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        """Load the tensors of one chunk."""
        with safe_open(update_info.path, framework="pt") as image:
            # The layerwise reload may keep tensors after this call. Their memory stays mapped even after the sender has
            # closed it
            self.model.load_weights((name, image.get_tensor(name)) for name in list(image.keys()))

    def shutdown(self) -> None:
        """Do nothing, because there is no connection to close."""


class NCCLEngine(Receipts, NCCLWeightTransferEngine):
    """vLLM's own NCCL engine, which also records each received tensor."""


def register_transports() -> None:
    """Register the engine's side of both transports with vLLM, in this process."""
    for name, engine in (("async_grpo_object_store", ObjectStoreEngine), ("async_grpo_nccl", NCCLEngine)):
        # This module may be imported twice in one process, and vLLM refuses to register a name twice
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, engine)
