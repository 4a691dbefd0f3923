"""`NCCLPublisher`: weights from GPU to GPU through vLLM's own NCCL engine, in the same transaction with the same proof.

vLLM's trainer engine gathers, broadcasts and drives start/update/finish; `Engines` is its client.
"""

import concurrent.futures
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from async_grpo.errors import DeadlineExceeded
from async_grpo.protocols import Receipt, WeightPackage
from async_grpo.weights.publisher import Publisher


class NCCLPublisher(Publisher):
    """The same transaction. The group has a fixed membership: when the set of workers has changed it is built anew before
    the next sync, so a late worker joins at a step's end."""

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

    def _send(self, draft: WeightPackage) -> tuple[WeightPackage, Mapping[str, Receipt]] | None:
        if self._engines is None:
            self._sender = self._sender or self.make_engine(0)
            self._sender.send_weights()  # takes part in the gathering, sends nothing
            return None
        members = self._engines.begin()
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
        return package, self._engines.each("receipt", package.canary_ids)

    def _within_deadline(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run in a daemon thread with a watchdog: an NCCL broadcast whose peer is gone never returns, and can neither be
        cancelled nor joined at exit."""
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
            return outcome.result(self._config.sync_timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise DeadlineExceeded(
                f"the NCCL transfer did not end within {self._config.sync_timeout_s:.0f} s (--sync-timeout-s): a peer is "
                "gone or unreachable; NCCL_DEBUG=INFO tells more, other values of --weight-transport need no NCCL"
            ) from error
