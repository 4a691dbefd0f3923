"""Generation, verification and log-probs that follow a script, so that a test says what happens when."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

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

GREEDY_MEMBER = -1  # the member that a greedy completion is for a script


class FakeGeneration:
    """Completes every prompt with `length(ordinal, member)` tokens after `delay(ordinal, member)` seconds.

    Tokens carry the policy version that is `live` when they are asked for, as an engine's would. Greedy completions
    are those of the member GREEDY_MEMBER.
    """

    def __init__(
        self,
        length: Callable[[int, int], int] = lambda ordinal, member: 3,
        delay: Callable[[int, int], float] = lambda ordinal, member: 0.0,
    ) -> None:
        self._length, self._delay = length, delay
        self.live = 0
        self.asked: list[int] = []  # ordinals, in the order they were asked for
        self.asked_greedily: list[int] = []
        self.cancelled = 0
        self._busy: list[tuple[float, float]] = []

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncGenerator[Completion]:
        greedy = sampling == GREEDY
        (self.asked_greedily if greedy else self.asked).append(prompt.ordinal)
        numbers = [GREEDY_MEMBER] * count if greedy else range(count)
        members = [asyncio.ensure_future(self._complete(prompt.ordinal, member)) for member in numbers]
        try:
            for member in asyncio.as_completed(members):
                yield await member
        finally:
            self.cancelled += sum(member.cancel() for member in members)

    async def _complete(self, ordinal: int, member: int) -> Completion:
        version, started = self.live, time.time()
        await asyncio.sleep(self._delay(ordinal, member))
        self._busy.append((started, time.time()))
        return replace(completion(self._length(ordinal, member), version), member=max(member, 0))

    async def take_stats(self) -> dict[str, Any]:
        busy, self._busy = self._busy, []
        return {"token_timeline": [], "wait_generation_weights_s": 0.0, "busy": busy}


def completion(length: int, version: int = 0, *, truncated: bool = False) -> Completion:
    """A completion of `length` tokens, one character each."""
    return Completion(
        token_ids=np.arange(1, length + 1, dtype=np.int32),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.full(length, version, np.int32),
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        text="x" * length,
        char_ends=np.arange(1, length + 1, dtype=np.int32),
    )


class FakeVerification:
    """Gives `reward(sample)` after `delay_s`: a number, a RewardStatus for a failure of that kind, or a whole result."""

    def __init__(
        self,
        reward: Callable[[dict[str, Any]], float | RewardStatus | AdapterResult] = lambda sample: float(
            len(sample["completion"])
        ),
        delay_s: float = 0.0,
    ) -> None:
        self._reward, self._delay_s = reward, delay_s

    async def start(self) -> None:
        """There is nothing to make."""

    async def close(self) -> None:
        """There is nothing to end."""

    async def verify(self, sample: dict[str, Any], *, evaluation: bool = False) -> Verdict:
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
        return list(verdicts)

    async def take_stats(self) -> dict[str, Any]:
        return {}


class FakeLogprobs:
    """Says that every completion token has the log-prob `value`."""

    def __init__(self, value: float = -1.0) -> None:
        self._value = value

    async def logprobs(
        self, sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int]
    ) -> list[np.ndarray]:
        lengths = [len(s) - p for s, p in zip(sequences, prompt_lengths, strict=True)]
        return [np.full(length, self._value, np.float32) for length in lengths]
