"""Pack the experts again after an update.

Written for vLLM 0.31 and 0.32. On the CPU, vLLM packs the experts of a layer into the memory layout of the kernel, but
only at the first load. After an update the kernel would read unpacked numbers as packed numbers, and log-probs would be
wrong by 2 nats. vLLM has no public call that packs experts.

Not needed any more when `UnquantizedFusedMoEMethod._setup_kernel` packs experts at every load. With this module, the
experts would then be packed twice.
"""

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform

_set_up_experts = UnquantizedFusedMoEMethod._setup_kernel


def set_up_and_pack_experts(
    self: UnquantizedFusedMoEMethod, layer: torch.nn.Module, w13: torch.Tensor, w2: torch.Tensor
) -> None:
    """Replace `UnquantizedFusedMoEMethod._setup_kernel`: pack experts also when they are loaded again."""
    is_loaded_again = self.moe_kernel is not None
    _set_up_experts(self, layer, w13, w2)
    if is_loaded_again:
        pack_experts(self, layer)


def pack_experts(method: UnquantizedFusedMoEMethod, layer: torch.nn.Module) -> None:
    """Pack the experts of a layer into the memory layout of its kernel."""
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def install_packing_of_experts() -> None:
    """Replace `_setup_kernel`, only on the CPU. Other platforms do not pack experts."""
    if current_platform.is_cpu():
        UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack_experts
