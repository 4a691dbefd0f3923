"""Rewards without a process: which they are, that they say what a process says, and that nothing makes them slow."""

import asyncio
import functools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, registry_file
from async_grpo.rewards.builtin import countdown, text
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.inline import BOUNDED, InlineReward
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import RewardStatus
from reward_registry import REWARD_ADAPTERS

REGISTRY = RewardRegistrySource.from_file(registry_file())
ROW = {"nums": [3, 4, 5], "target": 27, "group_id": 0, "truncated": False, "completion_token_ids": []}
SHIPPED = {"countdown": countdown.score, "format": text.format}
COMPLETIONS = ("so</think>\n<answer>3*(4+5)</answer>", "</think><answer>3+4</answer>", "<answer>", "")


def inline(name: str, adapter: Any = None, **options: Any) -> InlineReward:
    return InlineReward(name, adapter or SHIPPED[name], options)


async def make_inline(name: str) -> InlineReward:
    return inline(name, weight=0.2)


def test_only_the_shipped_functions_themselves_need_no_process() -> None:
    assert {str(kind.value) for kind, adapter in REWARD_ADAPTERS.items() if adapter in BOUNDED} == {
        *SHIPPED,
        "environment",  # which looks at no text
        "unscored",  # which looks at nothing
    }

    @functools.wraps(countdown.score)
    def wrapper(sample: dict) -> dict:
        return countdown.score(sample)

    def format(sample: dict) -> float:
        return 1.0

    assert wrapper not in BOUNDED and format not in BOUNDED


async def test_a_process_and_no_process_say_the_same() -> None:
    rows = [ROW | {"completion": completion} for completion in COMPLETIONS] + [{"completion": "no row"}]
    for name in SHIPPED:
        process = await AdapterProcess(REGISTRY, name, {"weight": 0.2}).start()
        try:
            for row in rows:
                there, here = await process.score(row, 30.0), await inline(name, weight=0.2).score(row, 30.0)
                assert (there.status, there.reward, there.extra) == (here.status, here.reward, here.extra)
                assert there.reason == here.reason
        finally:
            await process.close()


async def test_a_pool_counts_them_like_others_and_fails_after_its_close() -> None:
    pool = VerifierPool(("countdown", "format"), make_inline)
    async with pool:
        right = await pool.verify(ROW | {"completion": COMPLETIONS[0]})
        unknown = await pool.verify({"completion": "no row"})
        stats = pool.take_stats()
    assert right.reward == 1.1 and [result.attempts for result in right.results] == [1, 1]
    assert unknown.status is RewardStatus.FAILED
    assert (stats["countdown"]["ok"], stats["countdown"]["failed"], stats["format"]["ok"]) == (1, 1, 2)
    assert "nums" in stats["countdown"]["first_reason"] and 0 < stats["countdown"]["latency_max_s"] < 1
    assert (await pool.verify(ROW | {"completion": COMPLETIONS[0]})).status is RewardStatus.FAILED


HOSTILE = [
    "(" * 150 + "1" + ")" * 150,
    "-" * 300 + "1",
    "9" * 290 + "/9",
    "9*" * 149 + "9",
    "1/" * 149 + "7",
    "(1/" * 50 + "1" + ")" * 50,
    "1 " * 150,
]


@pytest.mark.parametrize("expression", HOSTILE)
def test_no_expression_is_slow_or_breaks_the_process(expression: str) -> None:
    completion = f"x</think>\n<answer>{expression}</answer>"
    started = time.process_time()
    for function in SHIPPED.values():
        function(ROW | {"completion": completion})
    assert time.process_time() - started < 1.0  # some milliseconds; a search that explodes takes minutes


@given(
    st.lists(
        st.sampled_from(["</think>", "\n", "<answer>", "</answer>", "1", "+", " ", "\u0301"]), max_size=12
    )
)
def test_a_long_text_takes_no_second(parts: list[str]) -> None:
    once = "".join(parts) or "x"
    completion = once * (20_000 // len(once)) + "</think>\n<answer>" + once * (20_000 // len(once))
    started = time.process_time()
    for function in SHIPPED.values():
        function(ROW | {"completion": completion})
    assert time.process_time() - started < 1.0


HUGE = ["1e999999999", "1E-999999999", "9" * 1_000, "1e1_000_000", 10**5000]


@pytest.mark.parametrize("huge", HUGE, ids=["up", "down", "long", "parted", "number"])
def test_a_row_with_a_huge_number_is_refused_at_once(huge: Any) -> None:
    for row in (ROW | {"target": huge}, ROW | {"nums": [1, huge]}):
        result = asyncio.run(inline("countdown").score(row | {"completion": COMPLETIONS[0]}, 1.0))
        assert result.status is RewardStatus.FAILED


def test_a_sample_stays_as_it_was_and_an_error_is_a_failure() -> None:
    def spoils(sample: dict) -> float:
        sample.clear()
        raise SystemExit("away")

    sample = ROW | {"completion": "x"}
    result = asyncio.run(inline("spoils", spoils).score(sample, 1.0))
    assert result.status is RewardStatus.FAILED and "away" in result.reason and sample["completion"] == "x"


def test_who_asks_for_processes_gets_them() -> None:
    def asked(**options: Any) -> list[bool]:
        config = RewardConfig(reward_fns="countdown,format", **options)
        return [config.has_verifiers(name) for name in config.adapters]

    assert asked() == [False, False] and asked(verifiers="format=4") == [False, True]
    assert asked(verifiers_per_reward=5) == [True, True]
