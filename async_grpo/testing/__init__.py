"""Fakes of the interfaces in `protocols.py`, so that batcher and trainer can be tested without vLLM and Ray.

`tests/house/test_fake_chain.py` runs a complete training with these fakes in a few seconds.
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
