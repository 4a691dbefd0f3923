"""The engine's side of a weight update: two transports plugged into vLLM's own interface, with a receipt.

Runs inside vLLM's worker processes (`worker_extension_cls` imports this module there).
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import safe_open
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
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
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import InputBatch

from async_grpo.protocols import TensorRecord
from async_grpo.weights.package import record
from async_grpo.weights.read_back import fingerprint, place_of, sampled, sampled_columns

WORKER_EXTENSION = "async_grpo.weights.vllm_engine.WeightReceipts"

# A round of the self-test sends one layer: vLLM would warn of every other one. What was lost, the receipt says.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class Receipts:
    """Mixin over a `WeightTransferEngine`: layerwise reload, the tied head, and the list of what arrived.

    While weights are loaded it stands in for the engine's model.
    """

    model: Any
    model_config: Any
    fingerprints: dict[str, int]  # of every tensor that ever arrived, as it was last

    def start_weight_update(self) -> None:
        self.received: dict[str, TensorRecord] = {}
        self.fingerprints = getattr(self, "fingerprints", {})
        initialize_layerwise_reload(self.model)
        self._model, self.model = self.model, self

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """The model's, noting every tensor on its way in."""
        return self._model.load_weights(self._noted(weights))

    def _noted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.received[name] = record(tensor)
            self.fingerprints[name] = fingerprint(sampled(tensor))
            yield name, tensor

    def finish_weight_update(self) -> None:
        self.model = self._model
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Let every LM head process its weight again. vLLM's layers pack their weights on the CPU when loading ends, and the
    layerwise reload re-packs only those that received a tensor of their own; a tied head would keep its old copy."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def shared_bytes(payload: memoryview | bytes, name: str) -> Iterator[str]:
    """A path under which other processes of this user can open (and mmap) `payload` while the block runs.

    After a SIGKILL on either side nothing stays in /dev/shm.
    """
    with os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "wb") as memory:
        memory.write(payload)
        memory.flush()
        yield f"/proc/{os.getpid()}/fd/{memory.fileno()}"


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """One chunk: the path of a safetensors image in shared memory of this machine."""

    path: str


class ObjectStoreEngine(Receipts, WeightTransferEngine[WeightTransferInitInfo, ObjectStoreUpdate]):
    """Weights through Ray's object store: works on the CPU, across nodes, and for any number of engines."""

    init_info_cls = WeightTransferInitInfo  # nothing to agree on beforehand: every chunk says where it lies
    update_info_cls = ObjectStoreUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # the shared memory is closed by the sender once this returns

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        with safe_open(update_info.path, framework="pt") as image:
            # The layerwise reload may keep tensors for longer: they are mapped, whoever made the image lets go of it
            self.model.load_weights((name, image.get_tensor(name)) for name in list(image.keys()))

    def shutdown(self) -> None:
        pass


class NCCLEngine(Receipts, NCCLWeightTransferEngine):
    """vLLM's own NCCL engine with our receipt."""


class WeightReceipts:
    """Methods added to vLLM's worker class, callable through `collective_rpc`."""

    weight_transfer_engine: Any  # the worker's own

    def weight_receipt(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """What the last update delivered to this worker, as plain values: name -> (dtype, shape, digest)."""
        return {name: astuple(one) for name, one in self.weight_transfer_engine.received.items()}

    def fingerprints(self) -> tuple[dict[str, int], dict[str, int]]:
        """By place: of what this process computes with, and of all that arrived there (`read_back`)."""
        used, arrived = in_use(self.weight_transfer_engine.model), self.weight_transfer_engine.fingerprints
        at = {
            place: [one for name, one in arrived.items() if place in (name, place_of(name))] for place in used
        }
        return used, {place: sum(several) % 2**64 for place, several in at.items()}


def in_use(model: torch.nn.Module) -> dict[str, int]:
    """Fingerprints, by place, of what the layers of this process compute with: its share of what is split over processes,
    the first one also what all hold. A tied head stands under the name of the tensor that it is tied to."""
    found, owners = Counter[str](), dict[int, str]()
    for path, layer in model.named_modules():
        for name, weight in layer.named_parameters(recurse=False):
            tied_to = owners.setdefault(weight.data_ptr() or id(weight), f"{path}.{name}")
            place = place_of(tied_to) if tied_to == f"{path}.{name}" else tied_to
            found[place] += fingerprint(_held(layer, name, weight))
    return {place: total % 2**64 for place, total in found.items()}


def _held(layer: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    rank, is_row = get_tensor_model_parallel_rank(), isinstance(layer, RowParallelLinear)
    may_split = isinstance(layer, (LinearBase, VocabParallelEmbedding))
    is_split = may_split and not isinstance(layer, ReplicatedLinear)
    if rank and (not is_split or (is_row and name == "bias")):
        return weight.new_zeros(1)
    method, multiplies = getattr(layer, "quant_method", None), isinstance(layer, (LinearBase, ParallelLMHead))
    if name != "weight" or not multiplies:
        return sampled(weight)
    if not isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
        return weight.new_zeros(1)  # other numbers than those that arrived
    width = layer.input_size if isinstance(layer, LinearBase) else layer.embedding_dim
    here = layer.input_size_per_partition if is_row else width
    columns = sampled_columns(width) - (rank * here if is_row else 0)
    inputs = torch.zeros(len(columns), here, dtype=weight.dtype, device=weight.device)
    for row, column in enumerate(columns.tolist()):
        if 0 <= column < here:  # of a matrix whose columns are split, this process holds some
            inputs[row, column] = 1
    return method.apply(layer, inputs, None)


DRAWN = "drawn"  # further argument of a request: tokens that another engine drew before, with the same seed
# Of a request: before its first draw here
_BEGINS = WeakKeyDictionary[torch.Generator, torch.Tensor]()


_add_request, _initialize = InputBatch.add_request, InputBatch.__init__


def add_request_drawing_on(self: InputBatch, request: Any) -> int:
    """`InputBatch.add_request`: a request that another engine began goes on with the draws that come next of its seed.

    With fresh draws those tokens that the other engine had made since it last told of them would be drawn again; and as
    completions are told of at once when they end, long ones would be given a second chance to be short.
    """
    if (generator := request.generator) is not None and generator not in _BEGINS:
        sampler = TopKTopPSampler("processed_logprobs")  # draws as the engine's own does
        for _ in range((request.sampling_params.extra_args or {}).pop(DRAWN, 0)):
            sampler(torch.zeros(1, self.vocab_size, device=generator.device), {0: generator}, None, None)
        _BEGINS[generator] = generator.get_state()
    return _add_request(self, request)


class CpuGenerators(dict[int, torch.Generator]):
    """Those of seeded requests in a batch. vLLM takes back the draw of a prefill that goes on by an offset, which a
    generator of the CPU has not: the engine would die. It is set back to its begin, where the first draw is still to come.
    """

    def get(self, index: int, default: Any = None) -> Any:
        if (generator := super().get(index)) is None:
            return default
        begin = _BEGINS[generator]
        return SimpleNamespace(get_offset=lambda: 0, set_offset=lambda _: generator.set_state(begin))


def initialize_with_cpu_generators(self: InputBatch, *args: Any, **options: Any) -> None:
    """`InputBatch.__init__`, with `CpuGenerators`."""
    _initialize(self, *args, **options)
    self.generators = CpuGenerators()


_set_up_experts = UnquantizedFusedMoEMethod._setup_kernel


def set_up_and_pack_experts(
    self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor
) -> None:
    """Replace `UnquantizedFusedMoEMethod._setup_kernel`: pack experts that are loaded again, too.

    Written for vLLM 0.32, which on the CPU packs experts into the layout of its grouped product at the first load alone.
    After an update the kernel would read unpacked numbers as packed ones: log-probs were wrong by 2 nats.
    """
    is_loaded_again = self.moe_kernel is not None
    _set_up_experts(self, layer, w13, w2)
    if is_loaded_again:
        pack_experts(self, layer)


def pack_experts(method: UnquantizedFusedMoEMethod, layer: torch.nn.Module) -> None:
    """Bring the experts' weights of a layer into the layout that its kernel computes with."""
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


InputBatch.add_request = add_request_drawing_on
if current_platform.is_cpu():
    InputBatch.__init__ = initialize_with_cpu_generators
    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack_experts
for _name, _engine in (("async_grpo_object_store", ObjectStoreEngine), ("async_grpo_nccl", NCCLEngine)):
    if _name not in WeightTransferEngineFactory._registry:  # the module may be imported twice in one process
        WeightTransferEngineFactory.register_engine(_name, _engine)
