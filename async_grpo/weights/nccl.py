"""`NCCLPublisher`: weights from GPU to GPU through vLLM's own NCCL engine, in the same transaction with the same proof.

vLLM's trainer engine gathers, broadcasts and drives start/update/finish; `Engines` is its client.
"""

import concurrent.futures
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from async_grpo.errors import DeadlineExceeded
from async_grpo.protocols import WeightPackage
from async_grpo.weights.publisher import Delivery, Publisher
from async_grpo.weights.threads import in_thread


class NCCLPublisher(Publisher):
    """The same transaction; all is sent, by collectives, before `publish` returns. The group has a fixed membership: when
    the set of workers has changed, as in a sync for late ones, it is built anew before the next sync."""

    _sender: Any = None
    _members: Mapping[str, int] | None = None

    def make_engine(self, world_size: int) -> Any:
        """vLLM's trainer-side NCCL engine, connected to all engines when this is rank 0."""
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as probe:
            probe.bind(("", 0))
            free_port = probe.getsockname()[1]
        address = self._engines.address if self._engines else ""  # only rank 0 opens the endpoint
        info = NCCLTrainerInitInfo(address, free_port, world_size, rank=self._rank)
        return WeightTransferTrainerFactory.trainer_init(info, client=self._engines, source=self._source)

    def _send(self, draft: WeightPackage) -> Delivery | None:
        if self._engines is None:
            self._sender = self._sender or self.make_engine(0)
            self._sender.send_weights()  # takes part in the gathering, sends nothing
            return None
        members = self._engines.begin(draft.for_late)
        if not members:  # whoever joined is gone again
            list(self._source)  # the other ranks gather
            return lambda: (draft, {})
        if self._members != members:
            if self._sender is not None:
                self._sender.shutdown()
            self._sender = self._within_deadline(self.make_engine, 1 + sum(members.values()))
            self._members = dict(members)
        self._engines.each("pause", draft.version)
        # If this fails the engines stay paused: the run is over
        self._within_deadline(self._sender.send_weights)
        self._engines.each("resume", draft.version)
        package = replace(draft, manifest=self._source.sent)
        receipts = self._engines.each("receipt", package.canary_ids)
        return lambda: (package, receipts)

    def _within_deadline(self, call: Callable[..., Any], *args: Any) -> Any:
        """With a watchdog: an NCCL broadcast whose peer is gone never returns."""
        outcome = in_thread(partial(call, *args), "nccl-transfer")
        concurrent.futures.wait([outcome], self._config.sync_timeout_s)
        if not outcome.done():
            raise DeadlineExceeded(
                f"the NCCL transfer did not end within {self._config.sync_timeout_s:.0f} s (--sync-timeout-s): a peer is "
                "gone or unreachable; NCCL_DEBUG=INFO tells more, other values of --weight-transport need no NCCL"
            )
        return outcome.result()
