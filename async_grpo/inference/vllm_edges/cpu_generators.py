"""The generators of seeded requests on the CPU, which have no offset.

Written for vLLM 0.31 and 0.32. A prefill that is not finished in one step samples a token that nobody wants, and vLLM takes
the draw back by the offset of the request's generator. torch's generators for the CPU have no offset, so the engine would
die at the first long prompt with a seed. Nothing in vLLM's interface says how a draw is taken back; this module replaces
the dictionary of generators in `InputBatch`.

Not needed any more when vLLM's model runner, or torch, does without the offset.
"""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_input_batch import InputBatch

from async_grpo.inference.vllm_edges.continued_draws import BEGIN_STATES

_initialize = InputBatch.__init__


class CpuGenerators(dict[int, torch.Generator]):
    """The generators of seeded requests in a batch.

    The draw of an unfinished prefill is taken back by the state that the generator had when the request was added to the
    batch. This is right because a request is prefilled, or after its preemption computed again, before it makes its next
    draw.
    """

    def get(self, index: int, default: Any = None) -> Any:
        """Return an object whose `set_offset` resets the generator of a request."""
        generator = super().get(index)
        if generator is None:
            return default
        begin = BEGIN_STATES[generator]
        return SimpleNamespace(get_offset=lambda: 0, set_offset=lambda _: generator.set_state(begin))


def initialize_with_cpu_generators(self: InputBatch, *args: Any, **options: Any) -> None:
    """Replace `InputBatch.__init__`: use `CpuGenerators`."""
    _initialize(self, *args, **options)
    self.generators = CpuGenerators()


def install_cpu_generators() -> None:
    """Put the replacement in place, on the CPU alone."""
    if current_platform.is_cpu():
        InputBatch.__init__ = initialize_with_cpu_generators
