"""A tied LM head that keeps its old weights after an update.

Written for vLLM 0.31 and 0.32, on the CPU. vLLM's layers pack their weights there when loading ends. The layerwise reload
of an update packs only layers again that received a tensor of their own. A tied head receives none: its weight arrives
under the name of the embedding. So it would go on multiplying by its old packed copy, and every log-prob would belong to a
network with the new body and the old head. vLLM's interface for transports has no hook for layers that received nothing.

Not needed any more when `finalize_layerwise_reload` packs tied heads again.
"""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Let every LM head process its weight again."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
