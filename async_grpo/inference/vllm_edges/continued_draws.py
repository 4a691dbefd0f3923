"""Continue a seeded request in another engine with its next random draws.

Written for vLLM 0.31 and 0.32. When an engine is lost, another engine continues its completions. The tokens that were
reported become part of the prompt. `SamplingParams.seed` starts a new generator at the first draw, and no parameter
says how many draws were made before. Therefore this module replaces `InputBatch.add_request`, and repeats the earlier
draws with the engine's own sampler. Sampling with other draws would bias the lengths: finished completions are reported
at once, so only long completions would be drawn a second time, and could become short.

On GPUs vLLM runs its Model Runner V2, which does not use `InputBatch`, so that the replacement has no effect. V2 does
not need it: it draws by a hash of the seed and the position in the sequence, so that a continued request makes the same
draws. On the CPU, and where V2 lacks a feature, vLLM runs V1. `model_runner` tells which runner an engine uses.

Not needed any more when a request can say how many draws of its seed to skip.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_input_batch import InputBatch

# Extra argument of a request: number of tokens that a lost engine has drawn with the same seed
DRAWN = "drawn"
# For the random generator of each request: its state when vLLM last added the request to a batch. After a preemption,
# vLLM adds the request again
BEGIN_STATES = WeakKeyDictionary[torch.Generator, torch.Tensor]()

_add_request = InputBatch.add_request


def add_request_drawing_on(self: InputBatch, request: Any) -> int:
    """Replace `InputBatch.add_request`: continue a lost engine's request with the next draws of its seed.

    Tokens that the lost engine drew after its last report are drawn again.
    """
    generator = request.generator
    if generator is not None:
        sampler = TopKTopPSampler("processed_logprobs")  # makes the same draws as the engine's own sampler
        # `pop` removes the number, so that the draws are not repeated if the request is added again after a preemption
        num_drawn = (request.sampling_params.extra_args or {}).pop(DRAWN, 0)
        for _ in range(num_drawn):
            logits = torch.zeros(1, self.vocab_size, device=generator.device)
            sampler(logits, {0: generator}, None, None)
        BEGIN_STATES[generator] = generator.get_state()
    return _add_request(self, request)


def model_runner(config: Any) -> str:
    """Return which model runner an engine with this `VllmConfig` uses: "V1" or "V2"."""
    return "V2" if getattr(config, "use_v2_model_runner", False) else "V1"


def install_continued_draws() -> None:
    """Replace `InputBatch.add_request` by `add_request_drawing_on`."""
    InputBatch.add_request = add_request_drawing_on
