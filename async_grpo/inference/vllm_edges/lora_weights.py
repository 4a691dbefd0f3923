"""Put the policy's adapter (LoRA) into an engine's layers from memory, and fingerprint the adapter that they hold.

Written for vLLM 0.32. By its public interface (`AsyncLLM.add_lora`) vLLM loads adapters only from folders, and it does
not report which adapter its kernels read. At the end of each weight update vLLM also removes all adapters
(`reset_lora_state`), because an adapter may belong to the old base. So the adapter is put in place after each update.
This module uses vLLM's `LoRAModelManager`, and reads the stacked matrices of its layers, from which the kernels compute.

Not needed any more when vLLM takes the tensors of an adapter by its weight update, and includes adapters in its
checksums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from async_grpo.weights.read_back import fingerprint

# Number of the policy's adapter in the engine, the only one that the engine has
LORA_ID = 1
NUM_NAMES = 5  # maximum number of names in an error message


@dataclass(frozen=True)
class HeldMatrix:
    """One matrix of the adapter with the values that a layer in this process has."""

    module: str  # name of the adapted module, such as "model.layers.0.self_attn.q_proj"
    kind: str  # "lora_A" or "lora_B"
    layer: Any  # vLLM's linear layer, which may join several modules
    values: torch.Tensor  # values in this process, padded with zeros to the largest rank

    @property
    def name(self) -> str:
        """Return the name under which the matrix is compared with the received one."""
        return f"{self.module}.{self.kind}"

    def is_counted(self) -> bool:
        """Return whether this process adds its values to the matrix's fingerprint, which is a sum over all processes.

        If several processes have the same values, only the first of them adds them, so that they count once.
        """
        rank = get_tensor_model_parallel_rank()
        if isinstance(self.layer, ReplicatedLinear):
            return rank == 0
        is_row = isinstance(self.layer, RowParallelLinear)
        if (self.kind == "lora_A") != is_row:
            # If a layer is split among processes, either its outputs (the rows of B) or its inputs (the columns of A)
            # are split. All processes have the whole of the other matrix, so only the first one adds it
            return rank == 0
        is_key_or_value = self.module.endswith(("k_proj", "v_proj"))
        num_replicas = getattr(self.layer, "num_kv_head_replicas", 1) if is_key_or_value else 1
        return rank % num_replicas == 0


class EngineLora:
    """The policy's adapter in one process of an engine.

    Args:
        manager: vLLM's `LoRAModelManager` of the process.
        rank: Rank of the adapter.
        scaling: Factor of the adapter's output, s in W + s * B @ A. The engine multiplies B by it.
    """

    def __init__(self, manager: Any, rank: int, scaling: float) -> None:
        self._manager = manager
        self._rank = rank
        self._scaling = scaling
        self._dtype = manager.lora_config.lora_dtype
        # Name of a matrix, such as "model.layers.0.self_attn.q_proj.lora_A" -> its last received values
        self._matrices: dict[str, torch.Tensor] = {}
        # Tensor name -> fingerprint of a received matrix, as the layers should hold it: B is already multiplied by the
        # scaling
        self._received: dict[str, int] = {}
        self._tensor_names: dict[str, str] = {}  # name of a matrix -> name of its tensor

    def missing_layers(self, names: Sequence[str]) -> list[str]:
        """Return the names in the list for which this engine has no layer that can apply an adapter."""
        modules = {matrix.module for matrix in self._held_matrices(slot=0)}
        return [name for name in names if self._module_of(f"{name}.lora_A.weight")[0] not in modules]

    def _module_of(self, tensor_name: str) -> tuple[str, bool]:
        """Return vLLM's name of the module to which a tensor of the adapter belongs, and whether the tensor is A."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        renames = mapper.get_rename_mapper() if mapper is not None else None
        return parse_fine_tuned_lora_name(tensor_name, renames)

    def receive(self, tensor_name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor of the adapter until `put_in_place`, under its name in peft's file."""
        module, is_a = self._module_of(tensor_name)
        matrix = tensor.to(self._dtype, copy=True)
        if not is_a:
            matrix = matrix * self._scaling
        name = f"{module}.lora_A" if is_a else f"{module}.lora_B"
        self._matrices[name] = matrix
        self._tensor_names[name] = tensor_name
        self._received[tensor_name] = fingerprint(matrix)

    def put_in_place(self) -> None:
        """Make the engine's layers compute with the matrices that were received last.

        Raises:
            RuntimeError: A matrix has no layer or another rank, or one of the two matrices of a module was never
                received.
        """
        held_names = {matrix.name for matrix in self._held_matrices(slot=0)}
        _refuse("have no layer in the engine that could apply them", self._matrices.keys() - held_names)
        modules = {name.rpartition(".")[0] for name in self._matrices}
        layers = {}
        incomplete = []
        of_other_rank = []
        for module in sorted(modules):
            a = self._matrices.get(f"{module}.lora_A")
            b = self._matrices.get(f"{module}.lora_B")
            if a is None or b is None:
                incomplete.append(module)
                continue
            if a.shape[0] != self._rank or b.shape[1] != self._rank:
                of_other_rank.append(module)
                continue
            # The scaling is 1, because B is already multiplied by it
            layers[module] = LoRALayerWeights(module, self._rank, self._rank, a, b, scaling=1)
        _refuse("lack one of their two matrices", incomplete)
        _refuse(f"have another rank than {self._rank}", of_other_rank)
        self._manager.remove_adapter(LORA_ID)
        self._manager.add_adapter(LoRAModel(LORA_ID, self._rank, layers))
        self._manager.activate_adapter(LORA_ID)

    def is_in_place(self) -> bool:
        """Return whether the layers have an adapter. Without one, the next request of the policy would end the engine."""
        return LORA_ID in self._manager.lora_index_to_id

    def fingerprints(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the fingerprints of the matrices in the layers, and of the received matrices, both by tensor name.

        A matrix in a layer for which nothing was received should be zero; it has the name of its module instead. To
        compare, add up the first table over all processes of the engine.
        """
        slots = self._manager.lora_index_to_id
        slot = slots.index(LORA_ID) if LORA_ID in slots else None
        used: dict[str, int] = dict.fromkeys(self._received, 0)
        received = dict(self._received)
        if slot is not None:
            for matrix in self._held_matrices(slot):
                name = self._tensor_names.get(matrix.name, matrix.name)
                used[name] = fingerprint(matrix.values) if matrix.is_counted() else 0
                received.setdefault(name, 0)
        return used, received

    def _held_matrices(self, slot: int) -> Iterator[HeldMatrix]:
        """Yield the matrices of one adapter with the values that the layers have.

        Args:
            slot: Index of the adapter among those in the layers.
        """
        for path, layer in self._manager.modules.items():
            modules = self._manager.packed_modules.get(path, [path])
            if len(modules) != len(layer.lora_a_stacked):
                # One adapter for several modules, such as the experts of a layer. Its form is unknown, so skip it
                continue
            for index, module in enumerate(modules):
                yield HeldMatrix(module, "lora_A", layer.base_layer, layer.lora_a_stacked[index][slot, 0])
                yield HeldMatrix(module, "lora_B", layer.base_layer, layer.lora_b_stacked[index][slot, 0])


def _refuse(problem: str, names: Sequence[str] | set[str]) -> None:
    """Raise an error if there are names of modules or matrices with a problem."""
    if names:
        first = ", ".join(sorted(names)[:NUM_NAMES])
        raise RuntimeError(f"{len(names)} parts of the adapter {problem}: {first}")
