"""An engine for `real_delays.py`: vLLM, but no completion leaves it before all of its step are generated."""

import asyncio
from collections import defaultdict

from async_grpo.inference.generation_worker import GenerationWorker

GROUPS = 16  # of a step, as in `real_delays.py`: they come in the order of admission


class StepwiseEngine(GenerationWorker):
    """Generates like its parent, and hands a step over as a whole: scoring starts when generation has ended."""

    _asked = 0

    async def complete(self, prompt_token_ids, seeds, sampling=None):
        """See `Engine`."""
        if not hasattr(self, "_steps"):
            self._steps = defaultdict(lambda: asyncio.Barrier(GROUPS))
        step = self._steps[self._asked // GROUPS]
        self._asked += 1
        completions = [one async for one in super().complete(prompt_token_ids, seeds, sampling)]
        async with asyncio.timeout(60):
            await step.wait()
        for one in completions:
            yield one
