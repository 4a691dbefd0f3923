"""A worker extension for vLLM that applies adapters wrongly on demand: what the proof of an adapter is there to catch."""

from typing import Any

import torch
from safetensors.torch import load_file
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from async_grpo.inference.vllm_edges import lora_on_cpu, tied_heads
from async_grpo.inference.vllm_edges.lora_weights import EngineLora
from async_grpo.inference.vllm_edges.worker_extension import WeightReceipts

FAULT = ""
MODULE = ""  # the module that is wrong
LAST: dict[str, torch.Tensor] = {}  # the matrices of the update before
put_in_place, add_lora_linear = EngineLora.put_in_place, lora_on_cpu.GroupedPunica.add_lora_linear


def _put_in_place(self: EngineLora) -> None:
    correct = dict(self._matrices)
    a, b = (f"{MODULE}.{kind}" for kind in ("lora_A", "lora_B"))
    if FAULT == "stale" and LAST:
        self._matrices = dict(LAST)
    elif FAULT == "zero":
        self._matrices = {name: torch.zeros_like(matrix) for name, matrix in correct.items()}
    elif FAULT == "missing":
        del self._matrices[a], self._matrices[b]
    elif FAULT == "swapped":
        self._matrices |= {a: correct[b].T, b: correct[a].T}
    elif FAULT == "unscaled":
        self._matrices[b] = correct[b] / self._scaling
    elif FAULT == "scaled twice":
        self._matrices[b] = correct[b] * self._scaling
    if FAULT != "removed":
        put_in_place(self)
    self._matrices = correct
    LAST.clear()
    LAST.update(correct)


def _add_lora_linear(self: Any, *args: Any, **options: Any) -> None:
    if FAULT != "not computed":
        add_lora_linear(self, *args, **options)


EngineLora.put_in_place = _put_in_place
lora_on_cpu.GroupedPunica.add_lora_linear = _add_lora_linear


class FaultyLora(WeightReceipts):
    def fail_by(self, fault: str, module: str = "") -> None:
        global FAULT, MODULE
        FAULT, MODULE = fault, module

    def load_base(self, path: str) -> None:
        """Load weights of the base from a file, behind the back of everything that records them."""
        model = self.model_runner.model
        initialize_layerwise_reload(model)
        model.load_weights(load_file(path).items())
        finalize_layerwise_reload(model, self.model_runner.model_config)
        tied_heads.repack_tied_heads(model)
