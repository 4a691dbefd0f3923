"""One weight update in single steps, where the trainer's own transfer engine drives it (NCCL)."""

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from async_grpo.protocols import Receipt

if TYPE_CHECKING:
    from async_grpo.generation.generation_worker import GenerationWorker


class TransferSteps:
    """What `protocols.EngineControl` asks of each `GenerationWorker`, in the order of the methods."""

    def __init__(self, worker: "GenerationWorker") -> None:
        self._worker = worker
        self._finished = False

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group."""
        await self._worker.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def pause(self, version: int) -> None:
        """Hold all requests; see `GenerationWorker.pause`."""
        self._finished = False
        await self._worker.pause(version)

    async def start_weight_update(self) -> None:
        await self._worker.engine.start_weight_update()

    async def receive_weights(self, update_info: dict[str, Any]) -> None:
        await self._worker.engine.update_weights(WeightTransferUpdateRequest(update_info))

    async def finish_weight_update(self) -> None:
        await self._worker.engine.finish_weight_update()
        self._finished = True

    async def resume(self, version: int) -> None:
        """Go on with `version`; an engine whose update did not finish resumes only to refuse its requests."""
        if not self._finished:
            self._worker.break_down("an update of its weights did not finish")
        await self._worker.engine.update_weight_version(str(version))
        await self._worker.resume()

    async def receipt(self, canary_ids: np.ndarray) -> Receipt:
        """What the last update delivered, and the canary's log-probs under it."""
        return await self._worker.receipt(), await self._worker.canary(canary_ids)
