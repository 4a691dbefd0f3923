"""`NCCLPublisher`: weights from GPU to GPU through vLLM's own NCCL engine, in the same transaction with the same proof.

vLLM's trainer engine gathers, broadcasts and drives start/update/finish; `Engines` is its client.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from async_grpo.modeling import full_tensor
from async_grpo.protocols import TensorRecord, WeightPackage
from async_grpo.weights.package import record
from async_grpo.weights.publisher import Delivery, Publisher, in_thread


@dataclass
class RecordingSource:
    """vLLM's `WeightSource`: full tensors in the wire dtype, each noted on its way out."""

    wire_dtype: torch.dtype
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sent: dict[str, TensorRecord] = field(default_factory=dict)

    def metadata(self) -> list[Any]:
        """Names, dtypes and full shapes of what will be sent; gathers nothing."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.wire_dtype, tuple(w.shape)) for name, w in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sent = {}
        for name, weight in self.weights.items():
            wired = full_tensor(weight, self.wire_dtype).contiguous()
            self.sent[name] = record(wired)
            yield name, wired


class NCCLPublisher(Publisher):
    """The same transaction; all is sent, by collectives, before `publish` returns. The group has a fixed membership: when
    the set of workers has changed, as in a sync for late ones, it is built anew before the next sync."""

    _sender: Any = None
    _members: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._source = RecordingSource(self.wire_dtype)

    def make_engine(self, world_size: int) -> Any:
        """vLLM's trainer-side NCCL engine, connected to all engines when this is rank 0."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as probe:
            probe.bind(("", 0))
            free_port = probe.getsockname()[1]
        address = self.engines.address if self.engines else ""  # only rank 0 opens the endpoint
        info = NCCLTrainerInitInfo(address, free_port, world_size, rank=self.rank)
        return WeightTransferTrainerFactory.trainer_init(info, client=self.engines, source=self._source)

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        self._source.weights = weights
        if self.engines is None:
            self._sender = self._sender or self.make_engine(0)
            self._sender.send_weights()  # takes part in the gathering, sends nothing
            return None
        members = self.engines.begin(draft.for_late)
        if not members:  # whoever joined is gone again
            list(self._source)  # the other ranks gather
            return lambda: (draft, {})
        if self._members != members:
            if self._sender is not None:
                self._sender.shutdown()
            self._sender = self._within_deadline(self.make_engine, 1 + sum(members.values()))
            self._members = dict(members)
        self.engines.each("pause", draft.version)
        # If this fails the engines stay paused: the run is over
        self._within_deadline(self._sender.send_weights)
        self.engines.each("resume", draft.version)
        package = replace(draft, manifest=self._source.sent)
        receipts = self.engines.each("receipt", package.canary_texts)
        return lambda: (package, receipts)

    def _within_deadline(self, call: Callable[..., Any], *args: Any) -> Any:
        """With a watchdog: an NCCL broadcast whose peer is gone never returns."""
        limit = self.config.sync_timeout_s
        silent = (
            f"the NCCL transfer did not end within {limit:.0f} s (--sync-timeout-s): a peer is gone or unreachable; "
            "NCCL_DEBUG=INFO tells more, other values of --weight-transport need no NCCL"
        )
        return in_thread(partial(call, *args), "nccl-transfer", limit, silent)()
