"""`NCCLPublisher`: weights from GPU to GPU through vLLM's own NCCL engine, in the same transaction with the same proof.

vLLM's trainer engine gathers, broadcasts and drives start/update/finish through a client of four methods; `EngineControl`
is that client and also pauses, resumes and collects receipts. The NCCL group has a fixed membership: when the set of
workers has changed, it is built anew before the next sync, so a late worker joins at a step's end.
"""

import concurrent.futures
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from async_grpo.errors import DeadlineExceeded
from async_grpo.modeling import full_tensor
from async_grpo.protocols import EngineControl, TensorRecord, WeightPackage
from async_grpo.weights.manifest import record
from async_grpo.weights.package import SELF_TEST, Differences
from async_grpo.weights.publisher import Canary, NamedTensors, TransactionalPublisher


class RecordingSource:
    """vLLM's `WeightSource` over a policy: yields full tensors in the wire dtype and notes each one on its way out."""

    def __init__(self, model: nn.Module, named_weights: NamedTensors, wire_dtype: torch.dtype) -> None:
        self._model, self._named_weights, self._wire_dtype = model, named_weights, wire_dtype
        self.names: Collection[str] | None = None  # what to send; None: every tensor
        self.sent: dict[str, TensorRecord] = {}

    def metadata(self) -> list[Any]:
        """Names, dtypes and full shapes of what will be sent; gathers nothing."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [
            ParamMeta(name, self._wire_dtype, tuple(tensor.shape)) for name, tensor in self._named_tensors()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.sent = {}
        for name, tensor in self._named_tensors():
            wired = full_tensor(tensor).to(self._wire_dtype).contiguous()
            self.sent[name] = record(wired)
            yield name, wired

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._named_weights(self._model):
            if self.names is None or name in self.names:
                yield name, tensor


def vllm_trainer_engine(
    control: EngineControl | None, source: RecordingSource, world_size: int, rank: int
) -> Any:
    """vLLM's trainer-side NCCL engine, connected to all engines when this is rank 0."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    address = control.address if control else ""  # only rank 0 opens the endpoint
    info = NCCLTrainerInitInfo(address, _free_port(), world_size, rank=rank)
    return WeightTransferTrainerFactory.trainer_init(info, client=control, source=source)


class NCCLPublisher(TransactionalPublisher):
    """The same transaction. Built on every rank; only rank 0 has a control.

    Args:
        make_engine: (control, source, world size of the transfer group, rank) -> vLLM's trainer engine.
        timeout_s: of a whole transfer: an NCCL broadcast whose peer is gone never returns by itself.
    """

    def __init__(
        self,
        control: EngineControl | None,
        named_weights: NamedTensors,
        canary: Canary,
        wire_dtype: torch.dtype,
        *,
        rank: int,
        timeout_s: float,
        tolerance: float | None = None,
        make_engine: Callable[[EngineControl | None, RecordingSource, int, int], Any] = vllm_trainer_engine,
    ) -> None:
        super().__init__(named_weights, canary, wire_dtype, tolerance)
        self._control, self._rank, self._timeout_s, self._make_engine = control, rank, timeout_s, make_engine
        self._source: RecordingSource | None = None
        self._engine: Any = None
        self._members: Mapping[str, int] | None = None

    def _send(
        self, model: nn.Module, draft: WeightPackage, names: Collection[str] | None = None
    ) -> Differences:
        self._source = self._source or RecordingSource(model, self._named_weights, self._wire_dtype)
        self._source.names = names
        if self._control is None:
            self._engine = self._engine or self._make_engine(None, self._source, 0, self._rank)
            self._engine.send_weights()  # takes part in the gathering, sends nothing
            return {}
        self._connect(self._control.begin(), self._source)
        self._control.pause(draft.version)
        # If this fails the engines stay paused: the run is over
        self._within_deadline(self._engine.send_weights)
        self._control.resume(draft.version)
        package = replace(draft, manifest=self._source.sent)
        receipts = self._control.receipts(package)
        differences = self._prove(package, receipts)
        if draft.version != SELF_TEST:
            self._control.commit(package, list(receipts))
        return differences

    def _connect(self, members: Mapping[str, int], source: RecordingSource) -> None:
        if self._members != members:
            if self._engine is not None:
                self._engine.shutdown()
            world_size = 1 + sum(members.values())
            self._engine = self._within_deadline(
                self._make_engine, self._control, source, world_size, self._rank
            )
            self._members = dict(members)

    def _within_deadline(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run in a daemon thread with a watchdog: a stuck NCCL call can neither be cancelled nor joined at exit."""
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        outcome: concurrent.futures.Future = concurrent.futures.Future()

        def on_device() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                outcome.set_result(call(*args))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=on_device, name="nccl-transfer", daemon=True).start()
        try:
            return outcome.result(self._timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise DeadlineExceeded(
                f"the NCCL transfer did not end within {self._timeout_s:.0f} s (--sync-timeout-s): a peer is gone or "
                "unreachable; NCCL_DEBUG=INFO tells more, other values of --weight-transport need no NCCL"
            ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
