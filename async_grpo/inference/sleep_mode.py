"""`SleepMode`: release an engine's GPU memory while the trainer computes, by vLLM's own sleep mode."""

from vllm.v1.engine.async_llm import AsyncLLM


class SleepMode:
    """The sleep of one engine. First its weights wake, then its KV cache.

    While an engine sleeps, vLLM schedules no request. The KV cache is empty, and at level 2 the weights are undefined
    until they are sent again. Buffers of the model keep their values.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self.is_asleep = False

    async def begin(self, level: int) -> None:
        """Wait until all requests have ended, and release the memory.

        Args:
            level: 1 moves the weights to main memory, 2 drops them. Both drop the KV cache.
        """
        await self._engine.sleep(level=level, mode="wait")
        self.is_asleep = True

    async def wake_weights(self) -> None:
        """Take the memory of the weights again, if the engine sleeps. vLLM still schedules no request."""
        if self.is_asleep:
            await self._engine.wake_up(tags=["weights"])

    async def wake_cache(self) -> None:
        """Take the memory of the KV cache again, if the engine sleeps. vLLM then schedules requests."""
        if self.is_asleep:
            await self._engine.wake_up(tags=["kv_cache"])
            self.is_asleep = False
