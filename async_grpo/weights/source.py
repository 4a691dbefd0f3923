"""What is sent: the tensors of the policy, by their names in a checkpoint."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from async_grpo.modeling import full_tensor
from async_grpo.protocols import TensorRecord
from async_grpo.weights.package import record

NamedTensors = Callable[[Any], Iterator[tuple[str, torch.Tensor]]]


@dataclass
class RecordingSource:
    """What is sent, as full tensors in the wire dtype, each noted on its way out; also vLLM's `WeightSource`."""

    named_weights: NamedTensors
    wire_dtype: torch.dtype
    model: Any = None
    names: Collection[str] | None = None  # what to send; None: every tensor
    sent: dict[str, TensorRecord] = field(default_factory=dict)

    def metadata(self) -> list[Any]:
        """Names, dtypes and full shapes of what will be sent; gathers nothing."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.wire_dtype, tuple(tensor.shape)) for name, tensor in self.chosen()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sent = {}
        for name, tensor in self.chosen():
            wired = full_tensor(tensor).to(self.wire_dtype).contiguous()
            self.sent[name] = record(wired)
            yield name, wired

    def chosen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is to be sent, as it lies in the model."""
        return ((n, t) for n, t in self.named_weights(self.model) if self.names is None or n in self.names)
