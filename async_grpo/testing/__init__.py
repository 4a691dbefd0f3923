"""Shipped stand-ins for the far side of each wall (`protocols.py`): real batcher, packing, trainer; no vLLM, no Ray.

`tests/house/test_fake_chain.py` runs a whole training on them in a few seconds.
"""

from async_grpo.testing.engine import FakeEngine, InProcessRun, InProcessWorker
from async_grpo.testing.scripted import FakeGeneration, FakeLogprobs, FakeVerification, completion
from async_grpo.types import GREEDY

__all__ = [
    "GREEDY",
    "FakeEngine",
    "FakeGeneration",
    "FakeLogprobs",
    "FakeVerification",
    "InProcessRun",
    "InProcessWorker",
    "completion",
]
