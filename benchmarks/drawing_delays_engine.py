"""An engine for `drawing_delays.py`. It keeps finished pictures until all pictures of their step are finished."""

import asyncio
from collections import defaultdict

from async_grpo.inference.drawing.engine import DrawingEngine

GROUPS = 16  # number of groups of a step, as in `drawing_delays.py`; they arrive in the order of admission


class StepwiseDrawing(DrawingEngine):
    """Draws pictures like its parent, but returns all pictures of a step together, so that scoring starts after drawing."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self._num_requests = 0
        self._barriers = defaultdict(lambda: asyncio.Barrier(GROUPS))

    async def complete(self, prompt_token_ids, seeds, sampling=None):
        """Yield the finished pictures once the whole step is finished. See `Engine`."""
        barrier = self._barriers[self._num_requests // GROUPS]
        self._num_requests += 1
        pictures = [picture async for picture in super().complete(prompt_token_ids, seeds, sampling)]
        async with asyncio.timeout(60):
            await barrier.wait()
        for picture in pictures:
            yield picture
