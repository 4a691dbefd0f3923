"""`NCCLPublisher`: sends weights from GPU to GPU through vLLM's NCCL engine, with the same proof as `Publisher`.

vLLM's trainer-side transfer engine gathers and broadcasts the weights. Before and after the broadcasts, it calls a
client (`AbortingClient`), which passes the calls on to `Engines`.
"""

import concurrent.futures
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch

from async_grpo.errors import DeadlineExceeded, WorkerLost
from async_grpo.modeling import compute_device, full_tensor, is_lora_tensor
from async_grpo.protocols import Engines, TensorRecord, WeightPackage
from async_grpo.weights.delta_tensors import KEEP, SentTensors
from async_grpo.weights.in_thread import in_thread
from async_grpo.weights.package import SELF_TEST, record
from async_grpo.weights.packed_round import Delivery
from async_grpo.weights.publisher import Publisher
from async_grpo.weights.traffic import Traffic

log = logging.getLogger(__name__)
ABORT_S = 30.0  # seconds that an aborted transfer has to end, in addition to --sync-timeout-s


@dataclass
class RecordingSource:
    """A `WeightSource` of vLLM. It yields each tensor as it travels, and records the digest of the full tensor.

    The digest is that of the tensor in the wire dtype. With `--weight-sync-deltas`, the names and contents that it
    yields are those of `delta_tensors`.
    """

    wire_dtype: torch.dtype
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sent: dict[str, TensorRecord] = field(default_factory=dict)
    sent_tensors: SentTensors = field(default_factory=lambda: SentTensors(Traffic()))

    def __post_init__(self) -> None:
        self.begin(self.weights)

    def begin(self, weights: Mapping[str, torch.Tensor], *, kept_names: Collection[str] = ()) -> None:
        """Set the weights of the next transfer.

        Args:
            weights: Tensors by name.
            kept_names: Names of the tensors that both sides keep, because changes to them may follow.
        """
        self.weights = weights
        self.sent = {}
        self._descriptions = []
        for name, weight in weights.items():
            name_on_wire = KEEP + name if name in kept_names else name
            self._descriptions.append((name_on_wire, self.wire_dtype, tuple(weight.shape)))
        self._remaining = self._kept(kept_names) if kept_names else self._gather()

    def begin_changes(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the weights of the next transfer, in which only changes travel. A collective, because it gathers all weights.

        The engines must be told the sizes of all changes before the transfer begins. So all changes are computed here,
        and stay in main memory until they are sent.
        """
        self.begin(weights)
        contents = []
        for name, full_weight in self._remaining:
            contents.append(self.sent_tensors.encode(name, full_weight, self.sent[name].digest))
        self._descriptions = [(name, content.dtype, tuple(content.shape)) for name, content in contents]
        devices = [compute_device(weight) for weight in weights.values()]
        self._remaining = (
            (name, content.to(device)) for (name, content), device in zip(contents, devices, strict=True)
        )

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that the transfer sends to each engine."""
        return sum(prod(shape) * dtype.itemsize for _, dtype, shape in self._descriptions)

    def metadata(self) -> list[Any]:
        """Return names, dtypes and full shapes of the tensors that will be sent, without gathering them."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(*description) for description in self._descriptions]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._remaining

    def _gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights, each gathered only when it is needed, and record each as sent."""
        for name, weight in self.weights.items():
            full_weight = full_tensor(weight, self.wire_dtype).contiguous()
            self.sent[name] = record(full_weight)
            if full_weight.is_cuda:
                # Wait until the gathering is finished, before vLLM broadcasts the tensor with another communicator.
                # Two communicators that work on one device at the same time can wait for each other forever
                torch.cuda.synchronize(full_weight.device)
            yield name, full_weight

    def _kept(self, kept_names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights as `_gather` does, and keep copies, so that the next sync can send only their changes."""
        for name, full_weight in self._gather():
            if name not in kept_names:
                yield name, full_weight
                continue
            self.sent_tensors.keep(name, full_weight, self.sent[name].digest)
            yield KEEP + name, full_weight

    def drain(self) -> None:
        """Gather the tensors that were not sent.

        The other ranks gather all tensors, and would wait forever for this rank.
        """
        for _ in self._remaining:
            pass


class AbortingClient:
    """Makes the engines available through the client interface that vLLM's trainer-side transfer engine calls.

    If an engine is lost while it joins or receives, the transfer is aborted, because NCCL would wait for it forever.
    """

    def __init__(
        self,
        engines: Engines,
        abort: Callable[[], None],
        abort_join: Callable[[WorkerLost], None] = lambda loss: None,
    ) -> None:
        self._engines = engines
        self._abort = abort
        self._abort_join = abort_join

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect all engines to the trainer."""
        try:
            self._engines.together("init_weight_transfer", init_info)
        except WorkerLost as loss:
            # End the trainer's wait explicitly. vLLM's trainer side waits inside NCCL for all members, and would see
            # the error only after this wait
            self._abort_join(loss)
            raise

    def start_weight_update(self) -> None:
        """Prepare all engines for new weights."""
        self._engines.together("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Make all engines receive the broadcast tensors."""
        try:
            self._engines.together("receive_weights", update_info)
        except WorkerLost:
            self._abort()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Make all engines use the tensors that they received."""
        self._engines.together("finish_weight_update")


class NCCLPublisher(Publisher):
    """A `Publisher` that sends all weights by NCCL broadcasts. They are sent when `publish` returns.

    An NCCL group has fixed members. If the set of workers has changed, as in a sync for workers that joined late, a new
    group is built before the sync. An engine that is lost before the transfer begins is left out. If an engine is lost
    during the transfer, all engines that wait for the same broadcast are lost as well, and are restarted.
    """

    packs_before_sending = False
    _sender: Any = None  # vLLM's trainer-side transfer engine; None without a group
    _join: concurrent.futures.Future  # set when the trainer has joined the group that is being built
    _members: Mapping[str, int] | None = None  # members of the NCCL group: worker id -> number of processes

    def __post_init__(self) -> None:
        super().__post_init__()
        self._source = RecordingSource(self.wire_dtype, sent_tensors=SentTensors(self._traffic))

    def make_engine(self, world_size: int) -> Any:
        """Return vLLM's trainer-side transfer engine. On rank 0 it is connected to all engines."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        from vllm.utils.network_utils import get_open_port

        address = self.engines.address if self.engines else ""  # engines connect only to rank 0
        client: Any = self.engines and AbortingClient(self.engines, self._leave_group, self._abort_join)
        # With more than one buffer, vLLM would gather the next tensors while it broadcasts the previous ones. Then two
        # communicators would work on one device at the same time, which can deadlock (see `RecordingSource`), and
        # engines would receive one buffer while they still read views of another
        info = NCCLTrainerInitInfo(address, get_open_port(), world_size, rank=self.rank, packed_num_buffers=1)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)

    def _send(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> Delivery | None:
        engines = self.engines
        if engines is None:
            self._source.begin(weights)
            self._sender = self._sender or self.make_engine(0)
            # On other ranks than 0, this only takes part in gathering the weights
            self._sender.send_weights()
            return None
        self._begin_transfer(draft, weights)
        engines.begin(draft.for_late)
        engines.each("pause", draft.version)
        if self._join_group(engines):
            self._broadcast(engines)
        self._source.drain()
        engines.each("resume", draft.version)
        receipts = engines.each("receipt", draft.canary_texts)
        if not receipts and not draft.for_late and draft.version <= 0:
            raise WorkerLost(f"no engine took the weights of version {draft.version}: see the log")
        manifest = self._source.sent
        return lambda draft: (replace(draft, manifest=manifest), receipts)

    def _begin_transfer(self, draft: WeightPackage, weights: Mapping[str, torch.Tensor]) -> None:
        """Choose whether the weights travel whole or as changes. Called on rank 0.

        They travel whole to workers that joined late, which have no weights yet, and in a self-test.
        """
        is_version = draft.version != SELF_TEST
        has_deltas = self.config.weight_sync_deltas and is_version
        if has_deltas and not draft.for_late and self._source.sent_tensors.has(weights):
            self._source.begin_changes(weights)
        else:
            # The base of an adapter that is sent alone travels once, so changes to it never follow
            all_change = self.named_updates is None
            kept_names = {name for name in weights if has_deltas and (all_change or is_lora_tensor(name))}
            self._source.begin(weights, kept_names=kept_names)
        if is_version:
            self._traffic.num_bytes += self._source.num_bytes

    def _broadcast(self, engines: Engines) -> None:
        """Broadcast the weights to the group. If the transfer is aborted, fence all members of the group."""
        try:
            self._within_deadline(self._sender.send_weights)
        except RuntimeError as error:
            # After an abort, the error comes either from the aborting client or from NCCL itself
            was_aborted = isinstance(error, WorkerLost) or self._sender is None
            if not was_aborted:
                raise
            self._leave_group()
            reason = WorkerLost(f"another engine was lost during the transfer to this engine ({error})")
            # Each member has only part of the weights, or still waits for them
            for worker_id in tuple(engines.members):
                engines.fence(worker_id, reason)

    def _join_group(self, engines: Engines) -> bool:
        """Make sure that an NCCL group with all engines of this sync exists. Return False if all engines were lost."""
        members = dict(engines.members)
        while members:
            if members == self._members:
                return True
            self._leave_group()
            try:
                self._join = concurrent.futures.Future()
                self._sender = self._within_deadline(
                    self.make_engine, 1 + sum(members.values()), outcome=self._join
                )
                self._members = members
            except (RuntimeError, DeadlineExceeded) as error:
                if members == engines.members:
                    raise  # no engine was lost, so another attempt would fail, too
                log.error("the NCCL group is built again without the engine that was lost: %s", error)
            members = dict(engines.members)
        return False

    def _leave_group(self) -> None:
        """Leave the group. This aborts a transfer that is in progress."""
        sender = self._sender
        self._sender = None
        self._members = None
        if sender is not None:
            sender.shutdown()

    def _abort_join(self, loss: WorkerLost) -> None:
        """Stop waiting for a group that a lost engine will never join."""
        if not self._join.done():
            self._join.set_exception(loss)

    def _within_deadline(
        self, call: Callable[..., Any], *args: Any, outcome: concurrent.futures.Future | None = None
    ) -> Any:
        """Return the result of a call.

        Args:
            call: The function.
            args: Its arguments.
            outcome: The future that gets the call's result. Other code may set it earlier, which ends the wait.

        Raises:
            DeadlineExceeded: The call did not return in time. For example, an NCCL broadcast to a lost peer never
                returns.
        """
        limit_s = self.config.sync_timeout_s + ABORT_S
        wait_for_result = in_thread(
            partial(call, *args),
            name="nccl-transfer",
            limit_s=limit_s,
            outcome=outcome,
            timeout_message=(
                f"the NCCL transfer did not end within {limit_s:.0f} s (--sync-timeout-s, and {ABORT_S:.0f} s): a peer is "
                "gone or unreachable; NCCL_DEBUG=INFO tells more, other values of --weight-transport need no NCCL"
            ),
        )
        return wait_for_result()
