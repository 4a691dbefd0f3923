"""Update a tied LM head, which would keep its old weights.

Written for vLLM 0.31 and 0.32, on the CPU, where vLLM's layers pack their weights at the end of loading. The layerwise
reload after an update packs only layers that received a tensor of their own. A tied head receives none, because its
weight arrives under the name of the embedding. The head would continue to multiply by its old packed copy, and
log-probs would be those of a network with the new body and the old head. vLLM's interface for transports has no hook
for layers that received nothing.

Not needed any more when `finalize_layerwise_reload` packs tied heads again.
"""

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Make every LM head pack its current weight again."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
