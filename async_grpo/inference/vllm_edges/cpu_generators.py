"""Undo a random draw of a seeded request on the CPU, where generators have no offset.

Written for vLLM 0.31 and 0.32. A prefill that takes several steps samples an unwanted token in each step before the
last. vLLM undoes the draw by resetting the offset of the request's generator. torch's generators for the CPU have no
offset, so the engine would crash at the first long prompt with a seed. vLLM has no public setting for this, so this
module replaces the dictionary of generators in `InputBatch`.

Not needed any more when vLLM's model runner does not need the offset, or torch's generators for the CPU have one.
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

    To undo the draw of an unfinished prefill, the generator returns to its state at the time when the request was added
    to the batch. That state is correct, because a request makes no wanted draw before its prefill ends. This is also
    true after a preemption, when the request is added and computed again.
    """

    def get(self, index: int, default: Any = None) -> Any:
        """Return an object for a request's generator. Its `set_offset` resets the generator, which undoes the draws."""
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
    """Replace `InputBatch.__init__`, only on the CPU."""
    if current_platform.is_cpu():
        InputBatch.__init__ = initialize_with_cpu_generators
