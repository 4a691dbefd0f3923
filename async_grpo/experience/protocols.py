"""What the batcher needs from the outside. Each is implemented in `cluster/` over Ray and in `fakes.py` for tests."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import numpy as np

from async_grpo.types import Completion, Prompt, Verdict


class Generation(Protocol):
    """Completes prompts on whichever engine has room."""

    def generate(self, prompt: Prompt, count: int, *, greedy: bool = False) -> AsyncIterator[Completion]:
        """Yield `count` completions, each as soon as it is finished.

        Greedy ones take the likeliest token at every place: for comparison, not to be trained on.
        """
        ...

    async def take_stats(self) -> dict[str, Any]:
        """Since the last call: `token_timeline` [(moment, tokens)], `wait_generation_weights_s`, and `busy`: the
        intervals in which an engine held unfinished requests."""
        ...


class Verification(Protocol):
    """Scores single samples."""

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """The verdict; samples of an evaluation never wait behind those of the training."""
        ...

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """The verdicts of one whole group, after the rewards have looked at all of it."""
        ...

    async def take_stats(self) -> dict[str, Any]:
        """Since the last call: `verifiers`, counts and latencies by adapter, and those of cache and budget."""
        ...


class Logprobs(Protocol):
    """Recomputes log-probs of completions under another policy."""

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        """(T,) float32 log-probs of each completion."""
        ...
