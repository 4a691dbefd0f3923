"""Fakes for the interfaces in `protocols.py`, with which batcher, packing and trainer run without vLLM and Ray.

`tests/house/test_fake_chain.py` runs a whole training with them in a few seconds.
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
