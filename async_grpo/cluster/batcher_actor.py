"""`BatcherActor`: an `ExperienceBatcher` over remote workers."""

from typing import Any

from async_grpo.cluster.ray_session import GENERATION
from async_grpo.cluster.remote_services import (
    RegisteredWorkers,
    RemoteGeneration,
    RemoteLogprobs,
    RemoteVerification,
)
from async_grpo.experience.batcher import BatcherConfig, ExperienceBatcher
from async_grpo.experience.dataset import Question


class BatcherActor:
    """Ends with rank 0's job."""

    def __init__(
        self, plan: BatcherConfig, questions: list[Question], registries: dict[str, Any], pool: Any
    ) -> None:
        def logprobs(kind: str) -> RemoteLogprobs | None:
            if kind not in registries:
                return None
            return RemoteLogprobs(RegisteredWorkers(registries[kind], f"{kind} logprob"))

        self._batcher = ExperienceBatcher(
            plan,
            questions,
            RemoteGeneration(RegisteredWorkers(registries[GENERATION], "generation")),
            RemoteVerification(pool),
            reference=logprobs("reference"),
            proximal=logprobs("proximal"),
        )

    async def start(self) -> None:
        await self._batcher.start()

    async def next_message(self, rank: int) -> Any:
        return await self._batcher.next_message(rank)

    async def weights_live(self, version: int) -> None:
        await self._batcher.weights_live(version)

    async def evaluate(self, questions: list[Question], count: int) -> dict[str, Any]:
        return await self._batcher.evaluate(questions, count)
