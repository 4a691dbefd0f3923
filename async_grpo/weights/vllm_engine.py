"""The engine's side of a weight update: two transports for vLLM's own interface, with a receipt.

This module runs inside vLLM's worker processes (`worker_extension_cls` imports it there).
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

# A round of the self-test sends one layer, and vLLM would warn about all other layers. Receipts report lost tensors.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class Receipts:
    """Mixin for a `WeightTransferEngine`: layerwise reload, the tied head, and the list of received tensors.

    While weights are loaded, it takes the place of the engine's model, so that it sees every tensor.
    """

    model: Any
    model_config: Any
    fingerprints: dict[str, int]  # by tensor, of its last version that was received

    def start_weight_update(self) -> None:
        """Prepare the model for new weights."""
        self.received: dict[str, TensorRecord] = {}
        self.fingerprints = getattr(self, "fingerprints", {})
        initialize_layerwise_reload(self.model)
        self._model = self.model
        self.model = self

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load weights into the model, and record every tensor."""
        return self._model.load_weights(self._recorded(weights))

    def _recorded(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, and record each."""
        for name, tensor in weights:
            self.received[name] = record(tensor)
            self.fingerprints[name] = fingerprint(sampled(tensor))
            yield name, tensor

    def finish_weight_update(self) -> None:
        """Let the model compute with the new weights."""
        self.model = self._model
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_heads(self.model)


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Let every LM head process its weight again.

    vLLM's layers pack their weights on the CPU when loading ends, and the layerwise reload packs only layers again that
    received a tensor of their own. A tied head would keep its old copy.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def shared_bytes(payload: memoryview | bytes, name: str) -> Iterator[str]:
    """Yield a path under which other processes of this user can open (and mmap) the payload while the block runs.

    Nothing stays in /dev/shm after a SIGKILL on either side.
    """
    with os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "wb") as memory:
        memory.write(payload)
        memory.flush()
        yield f"/proc/{os.getpid()}/fd/{memory.fileno()}"


@dataclass
class ObjectStoreUpdate(WeightTransferUpdateInfo):
    """One chunk: the path of a safetensors image in this machine's shared memory."""

    path: str


class ObjectStoreEngine(Receipts, WeightTransferEngine[WeightTransferInitInfo, ObjectStoreUpdate]):
    """Receives weights through Ray's object store, on CPUs and GPUs, across nodes, for any number of engines."""

    init_info_cls = WeightTransferInitInfo  # empty, because every chunk names its own path
    update_info_cls = ObjectStoreUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing, because there is no connection to set up."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one chunk, and return when the sender may close its shared memory."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()  # copies from the shared memory may still run

    def receive_weights(self, update_info: ObjectStoreUpdate) -> None:
        """Load the tensors of one chunk."""
        with safe_open(update_info.path, framework="pt") as image:
            # The layerwise reload may keep tensors for longer; they stay mapped when the sender closes the image
            self.model.load_weights((name, image.get_tensor(name)) for name in list(image.keys()))

    def shutdown(self) -> None:
        """Do nothing, because there is no connection to close."""


class NCCLEngine(Receipts, NCCLWeightTransferEngine):
    """vLLM's own NCCL engine with a receipt."""


class WeightReceipts:
    """Methods added to vLLM's worker class, callable through `collective_rpc`."""

    weight_transfer_engine: Any  # the worker's own

    def weight_receipt(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Return the tensors that this worker received in the last update, name -> (dtype, shape, digest)."""
        return {name: astuple(record) for name, record in self.weight_transfer_engine.received.items()}

    def fingerprints(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the fingerprints, by place, of the weights in use here, and of all received weights (`read_back`)."""
        used = in_use(self.weight_transfer_engine.model)
        received = dict.fromkeys(used, 0)
        for name, value in self.weight_transfer_engine.fingerprints.items():
            # A tied head has the name of the tensor as its place
            for place in {name, place_of(name)} & used.keys():
                received[place] = (received[place] + value) % 2**64
        return used, received


def in_use(model: torch.nn.Module) -> dict[str, int]:
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


DRAWN = "drawn"  # extra argument of a request: number of tokens that another engine drew before, with the same seed
# State of a request's generator before its first draw in this engine
_BEGINS = WeakKeyDictionary[torch.Generator, torch.Tensor]()


_add_request = InputBatch.add_request
_initialize = InputBatch.__init__


def add_request_drawing_on(self: InputBatch, request: Any) -> int:
    """Replace `InputBatch.add_request`: continue a request of another engine with the next draws of its seed.

    Tokens that the other engine drew after its last report are drawn again. Completions are reported at once when they
    end, so fresh draws would give long completions a second chance to be short.
    """
    generator = request.generator
    if generator is not None and generator not in _BEGINS:
        sampler = TopKTopPSampler("processed_logprobs")  # draws as the engine's own sampler does
        num_drawn = (request.sampling_params.extra_args or {}).pop(DRAWN, 0)
        for _ in range(num_drawn):
            logits = torch.zeros(1, self.vocab_size, device=generator.device)
            sampler(logits, {0: generator}, None, None)
        _BEGINS[generator] = generator.get_state()
    return _add_request(self, request)


class CpuGenerators(dict[int, torch.Generator]):
    """The generators of seeded requests in a batch.

    vLLM revokes the draw of an unfinished prefill by a generator's offset. CPU generators have no offset, so the engine
    would die. Here the generator returns to its initial state, because an unfinished prefill is always before the first
    draw.
    """

    def get(self, index: int, default: Any = None) -> Any:
        """Return an object whose `set_offset` resets the generator of a request."""
        generator = super().get(index)
        if generator is None:
            return default
        begin = _BEGINS[generator]
        return SimpleNamespace(get_offset=lambda: 0, set_offset=lambda _: generator.set_state(begin))


def initialize_with_cpu_generators(self: InputBatch, *args: Any, **options: Any) -> None:
    """Replace `InputBatch.__init__`: use `CpuGenerators`."""
    _initialize(self, *args, **options)
    self.generators = CpuGenerators()


_set_up_experts = UnquantizedFusedMoEMethod._setup_kernel


def set_up_and_pack_experts(
    self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor
) -> None:
    """Replace `UnquantizedFusedMoEMethod._setup_kernel`: also pack experts that are loaded again.

    This was written for vLLM 0.32, which on the CPU packs experts into the layout of its grouped product only at the first
    load. After an update the kernel would read unpacked numbers as packed ones, and log-probs would be wrong by 2 nats.
    """
    is_loaded_again = self.moe_kernel is not None
    _set_up_experts(self, layer, w13, w2)
    if is_loaded_again:
        pack_experts(self, layer)


def pack_experts(method: UnquantizedFusedMoEMethod, layer: torch.nn.Module) -> None:
    """Pack the experts' weights of a layer into the layout of its kernel."""
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


InputBatch.add_request = add_request_drawing_on
if current_platform.is_cpu():
    InputBatch.__init__ = initialize_with_cpu_generators
    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack_experts
for _name, _engine in (("async_grpo_object_store", ObjectStoreEngine), ("async_grpo_nccl", NCCLEngine)):
    # The module may be imported twice in one process
    if _name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_name, _engine)
