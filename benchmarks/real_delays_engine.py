"""An engine for `real_delays.py`: vLLM, but it keeps completions until all completions of their step are finished."""

import asyncio
from collections import defaultdict

from async_grpo.inference.generation_worker import GenerationWorker

GROUPS = 16  # number of groups of a step, as in `real_delays.py`; they arrive in the order of admission


class StepwiseEngine(GenerationWorker):
    """Generates like its parent, but returns all completions of a step together. So scoring starts after generation."""

    _asked = 0

    async def complete(self, prompt_token_ids, seeds, sampling=None):
        """Yield the completions once the whole step is finished. See `Engine`."""
        if not hasattr(self, "_steps"):
            self._steps = defaultdict(lambda: asyncio.Barrier(GROUPS))
        step = self._steps[self._asked // GROUPS]
        self._asked += 1
        completions = [one async for one in super().complete(prompt_token_ids, seeds, sampling)]
        async with asyncio.timeout(60):
            await step.wait()
        for one in completions:
            yield one
