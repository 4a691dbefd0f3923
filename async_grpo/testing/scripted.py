"""Fakes of generation, verification and log-probs whose results and delays are set by the test."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.types import (
    GREEDY,
    AdapterResult,
    Completion,
    FinishReason,
    Prompt,
    RewardStatus,
    Sampling,
    Session,
    Verdict,
)

GREEDY_MEMBER = -1  # member number that the test's functions get for a greedy completion


class FakeGeneration:
    """A `Generation` whose completions have `length(ordinal, member)` tokens after `delay(ordinal, member)` seconds.

    For greedy completions, `member` is GREEDY_MEMBER.

    Attributes:
        live: The policy version of new tokens.
        asked: Ordinals of the requested prompts, in the order of the requests.
        asked_greedily: Ordinals of the prompts for which greedy completions were requested, in the order of requests.
        cancelled: Number of completions that were cancelled.
    """

    def __init__(
        self,
        length: Callable[[int, int], int] = lambda ordinal, member: 3,
        delay: Callable[[int, int], float] = lambda ordinal, member: 0.0,
    ) -> None:
        self.live = 0
        self.asked: list[int] = []
        self.asked_greedily: list[int] = []
        self.cancelled = 0
        self._length = length
        self._delay = delay
        self._busy: list[tuple[float, float]] = []

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        """Yield `count` completions, each after its delay; see `Generation`."""
        if sampling == GREEDY:
            self.asked_greedily.append(prompt.ordinal)
            members = [GREEDY_MEMBER] * count
        else:
            self.asked.append(prompt.ordinal)
            members = list(range(count))
        tasks = [asyncio.ensure_future(self._complete(prompt.ordinal, member)) for member in members]
        try:
            for next_completion in asyncio.as_completed(tasks):
                yield await next_completion
        finally:
            for task in tasks:
                is_unfinished = task.cancel()
                if is_unfinished:
                    self.cancelled += 1

    async def _complete(self, ordinal: int, member: int) -> Completion:
        version = self.live
        started_at = time.time()
        await asyncio.sleep(self._delay(ordinal, member))
        self._busy.append((started_at, time.time()))
        return replace(completion(self._length(ordinal, member), version), member=max(member, 0))

    async def take_stats(self) -> dict[str, Any]:
        """Return the statistics since the last call; see `Generation`."""
        busy = self._busy
        self._busy = []
        return {"token_timeline": [], "wait_generation_weights_s": 0.0, "busy": busy}


def completion(length: int, version: int = 0, *, truncated: bool = False) -> Completion:
    """Return a completion of `length` tokens with one character each."""
    return Completion(
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.full(length, version, np.int32),
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        text="x" * length,
        char_ends=np.arange(1, length + 1, dtype=np.int32),
    )


class FakeVerification:
    """A `Verification` that returns `reward(sample)` after `delay_s` seconds.

    `reward` returns a number, a RewardStatus for a failure with this status, or a complete AdapterResult.
    """

    def __init__(
        self,
        reward: Callable[[dict[str, Any]], float | RewardStatus | AdapterResult] = lambda sample: float(
            len(sample["completion"])
        ),
        delay_s: float = 0.0,
    ) -> None:
        self._reward = reward
        self._delay_s = delay_s

    async def start(self) -> None:
        """Do nothing: there is nothing to start."""

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
        """Return the verdict on a sample; see `Verification`."""
        await asyncio.sleep(self._delay_s)
        outcome = self._reward(sample)
        if isinstance(outcome, AdapterResult):
            return Verdict(outcome.status, outcome.reward, (outcome,))
        if isinstance(outcome, RewardStatus):
            return Verdict(outcome, None, (AdapterResult("fake", outcome, reason="as scripted"),))
        return Verdict(RewardStatus.OK, outcome, (AdapterResult("fake", RewardStatus.OK, outcome),))

    async def post_process(
        self, samples: Sequence[dict[str, Any]], verdicts: Sequence[Verdict], *, evaluation: bool = False
    ) -> list[Verdict]:
        """Return the verdicts unchanged; see `Verification`."""
        return list(verdicts)

    async def take_stats(self) -> dict[str, Any]:
        """Return no statistics; see `Verification`."""
        return {}


class FakeLogprobs:
    """A `Logprobs` source that returns the log-prob `value` for every completion token."""

    def __init__(self, value: float = -1.0) -> None:
        self._value = value

    async def logprobs(
        self,
        sequences: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        allowed: Sequence[AllowedTokens | None] | None = None,
    ) -> list[np.ndarray]:
        """Return one array of log-probs for each sequence; see `Logprobs`."""
        logprobs = []
        for sequence, prompt_length in zip(sequences, prompt_lengths, strict=True):
            num_tokens = len(sequence) - prompt_length
            logprobs.append(np.full(num_tokens, self._value, np.float32))
        return logprobs
