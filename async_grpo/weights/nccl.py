"""`NCCLPublisher`: weights from GPU to GPU through vLLM's own NCCL engine, in the same transaction with the same proof.

vLLM's trainer engine gathers, broadcasts and drives start/update/finish; `Engines` is its client.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from async_grpo.errors import DeadlineExceeded, WorkerLost
from async_grpo.modeling import full_tensor
from async_grpo.protocols import Engines, TensorRecord, WeightPackage
from async_grpo.weights.package import record
from async_grpo.weights.publisher import Delivery, Publisher, in_thread

log = logging.getLogger(__name__)
ABORT_S = 30.0  # beyond --sync-timeout-s, within which an aborted transfer must have ended


@dataclass
class RecordingSource:
    """vLLM's `WeightSource`: full tensors in the wire dtype, each noted on its way out; gone through once."""

    wire_dtype: torch.dtype
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sent: dict[str, TensorRecord] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.begin(self.weights)

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """These are the ones to send next."""
        self.weights, self.sent, self._rest = weights, {}, self._gathered()

    def metadata(self) -> list[Any]:
        """Names, dtypes and full shapes of what will be sent; gathers nothing."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, self.wire_dtype, tuple(w.shape)) for name, w in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._rest

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in self.weights.items():
            wired = full_tensor(weight, self.wire_dtype).contiguous()
            self.sent[name] = record(wired)
            yield name, wired

    def drain(self) -> None:
        """Gather what was not sent: the other ranks do, once, whatever becomes of the transfer."""
        for _ in self._rest:
            pass


class AbortingClient:
    """What vLLM's trainer engine asks the engines for. When one is lost while they receive, the transfer is aborted: a
    broadcast to a peer that is gone never returns."""

    def __init__(self, engines: Engines, abort: Callable[[], None]) -> None:
        self._engines, self._abort = engines, abort

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engines.together("init_weight_transfer", init_info)

    def start_weight_update(self) -> None:
        self._engines.together("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self._engines.together("receive_weights", update_info)
        except WorkerLost:
            self._abort()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engines.together("finish_weight_update")


class NCCLPublisher(Publisher):
    """The same transaction; all is sent, by collectives, before `publish` returns. The group has a fixed membership: when
    the set of workers has changed, as in a sync for late ones, it is built anew before the next sync. An engine that is
    lost before the weights are on their way is left out; one that is lost later takes those with it that wait for the
    same broadcast: their dispatchers start them again."""

    _sender: Any = None
    _members: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._source = RecordingSource(self.wire_dtype)

    def make_engine(self, world_size: int) -> Any:
        """vLLM's trainer-side NCCL engine, connected to all engines when this is rank 0."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        address = self.engines.address if self.engines else ""  # only rank 0 opens the endpoint
        client: Any = self.engines and AbortingClient(self.engines, self._leave_group)
        info = NCCLTrainerInitInfo(address, get_open_port(), world_size, rank=self.rank)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        self._source.begin(weights)
        if (engines := self.engines) is None:
            self._sender = self._sender or self.make_engine(0)
            self._sender.send_weights()  # takes part in the gathering, sends nothing
            return None
        engines.begin(draft.for_late)
        engines.each("pause", draft.version)
        if self._join_group(engines):
            try:
                self._within_deadline(self._sender.send_weights)
            except RuntimeError as error:  # of NCCL, which was aborted, or of the client that did so
                if not isinstance(error, WorkerLost) and self._sender is not None:
                    raise
                self._leave_group()
                lost = WorkerLost(f"an engine was lost in the transfer that this one was part of ({error})")
                for worker_id in tuple(engines.members):  # they hold a part of the weights, or wait for it
                    engines.fence(worker_id, lost)
        self._source.drain()
        engines.each("resume", draft.version)
        receipts = engines.each("receipt", draft.canary_texts)
        if not receipts and not draft.for_late and draft.version <= 0:
            raise WorkerLost(f"no engine took the weights of version {draft.version}: see the log")
        package = replace(draft, manifest=self._source.sent)
        return lambda: (package, receipts)

    def _join_group(self, engines: Engines) -> bool:
        """Be in one group with all engines of this sync; False: none is left."""
        while members := dict(engines.members):
            if members == self._members:
                return True
            self._leave_group()
            try:
                self._sender = self._within_deadline(self.make_engine, 1 + sum(members.values()))
                self._members = members
            except (RuntimeError, DeadlineExceeded) as error:
                if members == engines.members:
                    raise  # nobody was lost: it would fail again
                log.error("the NCCL group is built again without the engine that was lost: %s", error)
        return False

    def _leave_group(self) -> None:
        """Abort what is under way, and let go of the group."""
        sender, self._sender, self._members = self._sender, None, None
        if sender is not None:
            sender.shutdown()

    def _within_deadline(self, call: Callable[..., Any], *args: Any) -> Any:
        """With a watchdog: an NCCL broadcast whose peer is gone never returns."""
        limit = self.config.sync_timeout_s + ABORT_S
        silent = (
            f"the NCCL transfer did not end within {limit:.0f} s (--sync-timeout-s, and {ABORT_S:.0f} s): a peer is gone "
            "or unreachable; NCCL_DEBUG=INFO tells more, other values of --weight-transport need no NCCL"
        )
        return in_thread(partial(call, *args), "nccl-transfer", limit, silent)()
