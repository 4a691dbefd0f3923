"""A seeded request goes on with the draws that come next in another engine.

Written for vLLM 0.31 and 0.32. When an engine is lost, another continues its completions after the tokens that were
reported, as part of the prompt. `SamplingParams.seed` starts a new generator at its first draw, and no parameter says how
many draws were made before, so this module replaces `InputBatch.add_request` and makes those draws by the engine's own
sampler. Completions are reported at once when they end, so fresh draws would give long ones a second chance to be short.

Not needed any more when a request can say where in the sequence of its seed it begins.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import InputBatch

DRAWN = "drawn"  # extra argument of a request: number of tokens that another engine drew before, with the same seed
# State of a request's generator when the request was last added to a batch. A preempted request is added again
BEGIN_STATES = WeakKeyDictionary[torch.Generator, torch.Tensor]()

_add_request = InputBatch.add_request


def add_request_drawing_on(self: InputBatch, request: Any) -> int:
    """Replace `InputBatch.add_request`: continue a request of another engine with the next draws of its seed.

    Tokens that the other engine drew after its last report are drawn again.
    """
    generator = request.generator
    if generator is not None:
        sampler = TopKTopPSampler("processed_logprobs")  # draws as the engine's own sampler does
        # Taken out, so that the draws are made once, however often the request is added
        num_drawn = (request.sampling_params.extra_args or {}).pop(DRAWN, 0)
        for _ in range(num_drawn):
            logits = torch.zeros(1, self.vocab_size, device=generator.device)
            sampler(logits, {0: generator}, None, None)
        BEGIN_STATES[generator] = generator.get_state()
    return _add_request(self, request)


def install_continued_draws() -> None:
    """Put the replacement in place."""
    InputBatch.add_request = add_request_drawing_on
