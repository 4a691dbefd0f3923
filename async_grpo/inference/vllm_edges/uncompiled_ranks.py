"""Count the ranks of sampled tokens on the CPU without compiling.

Written for vLLM 0.31 and 0.32. vLLM's sampler counts how many tokens are more probable than the sampled one, in a function
that it compiles at its first call, also with `enforce_eager`. On a GPU that saves memory. On the CPU the compiler takes a
second of each engine's start, for one comparison and one sum. vLLM has no public setting for it.

Not needed any more when vLLM compiles nothing with `enforce_eager`.
"""

import inspect

from vllm.platforms import current_platform
from vllm.v1.sample import sampler
from vllm.v1.sample.ops.logprobs import batched_count_greater_than


def install_uncompiled_ranks() -> None:
    """Replace the compiled function of vLLM's sampler by the same function without compilation, only on the CPU."""
    if current_platform.is_cpu():
        sampler.batched_count_greater_than = inspect.unwrap(batched_count_greater_than)
