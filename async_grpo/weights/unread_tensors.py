"""`UnreadTensors`: the tensors that some worker cannot read back. Only the canary shows whether it uses them."""

import logging

from async_grpo.protocols import Manifest

log = logging.getLogger(__name__)


class UnreadTensors:
    """Collects the names of tensors that some worker cannot read back, from the receipts of a self-test."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._blind: set[str] = set()  # ids of workers that can read back no tensor at all

    def add(self, worker_id: str, received: Manifest) -> None:
        """Add the tensors that a worker received and could not read back. Warn once if the worker can read back none."""
        unread = {name for name, tensor in received.items() if not tensor.is_read_back}
        if unread and len(unread) == len(received) and worker_id not in self._blind:
            self._blind.add(worker_id)
            log.warning(
                "worker %s can read back none of its %d weights: only the canary shows whether it computes with "
                "those that it receives (docs/operations.md, Refused: what now)",
                worker_id,
                len(unread),
            )
        self.names |= unread
