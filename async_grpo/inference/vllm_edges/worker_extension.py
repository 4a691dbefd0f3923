"""Add methods to every process of an engine, called by name. Importing this module also installs the replacements.

Written for vLLM 0.31 and 0.32. vLLM imports the module of `worker_extension_cls` in each process that computes the model,
and adds the methods of the class to its worker, where `AsyncLLM.collective_rpc` finds them. The argument and the call
are public. Two things are not: the attribute `weight_transfer_engine` of vLLM's worker, which the methods read, and
that vLLM imports the module before the first request, so that this module can replace parts of vLLM in time.

Not needed any more when vLLM reports which weights arrived and which are in use, and no replacement is left.
"""

from dataclasses import astuple
from typing import Any

import torch

from async_grpo.inference.vllm_edges.continued_draws import install_continued_draws
from async_grpo.inference.vllm_edges.cpu_generators import install_cpu_generators
from async_grpo.inference.vllm_edges.experts import install_packing_of_experts
from async_grpo.inference.vllm_edges.lora_on_cpu import install_grouped_lora
from async_grpo.inference.vllm_edges.lora_weights import EngineLora
from async_grpo.inference.vllm_edges.part_names import by_received_names
from async_grpo.inference.vllm_edges.receive_weights import register_transports
from async_grpo.inference.vllm_edges.uncompiled_ranks import install_uncompiled_ranks
from async_grpo.inference.vllm_edges.weights_in_use import fingerprints_in_use
from async_grpo.weights.read_back import place_of

WORKER_EXTENSION = f"{__name__}.WeightReceipts"


class WeightReceipts:
    """Methods added to vLLM's worker class, callable through `collective_rpc`."""

    weight_transfer_engine: Any  # attribute of vLLM's worker
    model_runner: Any  # attribute of vLLM's worker

    def begin_adapter(self, rank: int, scaling: float, layers: list[str]) -> list[str]:
        """Prepare for the policy's adapter, and return the names of layers that this engine lacks.

        Args:
            rank: Rank of the adapter.
            scaling: Factor of the adapter's output.
            layers: Names of the model's layers that the adapter changes.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = EngineLora(manager, rank, scaling)
        self.weight_transfer_engine.adapter = adapter
        return adapter.missing_layers(layers)

    def put_adapter_in_place(self) -> None:
        """Make the layers compute with the adapter that was received. Called after each weight update.

        Raises:
            RuntimeError: The adapter does not fit the layers, or the layers do not have it afterwards.
        """
        self.weight_transfer_engine.adapter.put_in_place()
        if not self.weight_transfer_engine.adapter.is_in_place():
            raise RuntimeError(
                "the engine has no adapter after an update: the received adapter was never applied"
            )

    def adapter_fingerprints(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return fingerprints of the adapter in use and of the received one. See `EngineLora.fingerprints`."""
        return self.weight_transfer_engine.adapter.fingerprints()

    def weight_receipt(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Return the tensors that this worker received in the last update, as name -> (dtype, shape, digest)."""
        return {name: astuple(record) for name, record in self.weight_transfer_engine.received.items()}

    def fingerprints(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the fingerprints of the weights in use in this process, and those of all received weights.

        The keys of both are places, as in `fingerprints_in_use`. The second one lacks places that have received nothing. A
        fingerprint of 0 says something else: the place has received zeros.
        """
        model = self.weight_transfer_engine.model
        fingerprints_received = getattr(self.weight_transfer_engine, "fingerprints", {})
        used = by_received_names(model, fingerprints_in_use(model), fingerprints_received)
        received: dict[str, int] = {}
        for name, value in fingerprints_received.items():
            # A tied head is fingerprinted under its full tensor name, all other weights under their module (`place_of`)
            for place in {name, place_of(name)} & used.keys():
                received[place] = (received.get(place, 0) + value) % 2**64
        return used, received

    def peak_gpu_bytes(self) -> int:
        """Return the most GPU memory in bytes that the allocator of this process has reserved; 0 without a GPU."""
        return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0

    def leave_transfer_group(self) -> None:
        """Leave the transport's group of processes. See `transfer_group`."""
        self.weight_transfer_engine.shutdown()


register_transports()
install_continued_draws()
install_cpu_generators()
install_packing_of_experts()
install_uncompiled_ranks()
install_grouped_lora()
