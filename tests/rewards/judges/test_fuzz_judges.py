"""A few of the replies of `benchmarks/fuzz_judges.py`: none holds up the loop in which all judges are asked."""

import asyncio
import json
import time

import hostile_server as hostile
import pytest
from hostile_server import HostileServer

from async_grpo.rewards.http.endpoint import Endpoint
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges import GenerativeRM, HTTPScorer, LLMJudge
from async_grpo.types import RewardStatus
from benchmarks.fuzz_judges import LONGEST_TURN_S, SCHEMA, LoopWatch, fuzz

MEGABYTES_3 = 3 * 2**20


async def test_no_hostile_reply_holds_up_the_loop_or_makes_a_reward_of_nothing():
    report = await fuzz(seed=7, count=24, max_bytes=200_000, request_s=1.0, at_once=8)
    assert not report.violations
    assert report.num_calls == 24 and report.num_scored >= 2  # the honest ones


def chat(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()


JUDGES = {
    "score line": lambda url: LLMJudge(url=url, model="m"),
    "schema": lambda url: LLMJudge(url=url, model="m", json_schema=SCHEMA),
    "pattern": lambda url: LLMJudge(url=url, model="m", pattern=r"(?:\s*\w*)*[Ss]core: (\S+)\s*$"),
    "yes or no": lambda url: GenerativeRM(url=url, model="m", yes_no=True),
    "scorer": lambda url: HTTPScorer(url=url),
}
LARGE = {
    "white space": ("schema", chat(" " * MEGABYTES_3)),
    "white space that is read": ("schema", chat(" " * 390_000 + "x")),
    "a thought without end": ("score line", chat("<think>" * 50_000)),
    "mentions": ("score line", chat("Score: 1 " * 40_000)),
    "words for a pattern": ("pattern", chat("a " * 190_000)),
    "words for a schema": ("schema", chat('{"score": 1, "why": "' + "a" * 30_000 + '!"}')),
    "objects": ("scorer", b'{"a":[' + b",".join([b"{}"] * (MEGABYTES_3 // 3)) + b"]}"),
    "numbers": ("scorer", b'{"a":[' + b",".join([b"1.5"] * (MEGABYTES_3 // 4)) + b"]}"),
    "names": ("scorer", b"{" + b",".join(b'"%07d":1' % n for n in range(MEGABYTES_3 // 12)) + b"}"),
    "digits": ("scorer", b'{"a":' + b"1" * MEGABYTES_3 + b"}"),
    "brackets": ("scorer", b'{"a":' + b"[" * MEGABYTES_3),
    "choices": ("score line", b'{"choices":[' + b",".join([b"{}"] * (MEGABYTES_3 // 3)) + b"]}"),
    "tokens": (
        "yes or no",
        b'{"choices":[{"message":{"content":"Yes"},"logprobs":{"content":[{"top_logprobs":['
        + b",".join([b'{"token":"Yes","logprob":-9}'] * (MEGABYTES_3 // 29))
        + b"]}]}}]}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
async def test_a_reply_of_megabytes_is_read_beside_the_loop_or_not_at_all(kind):
    name, body = LARGE[kind]
    async with HostileServer(hostile.status(200, body)) as server:
        judge = JUDGES[name](server.url)
        endpoint = Endpoint((server.url,), attempts=1, timeout_s=30.0)
        worker = JudgeWorker(name, judge, endpoint, Limiter(), "train")
        try:
            async with LoopWatch() as watch:
                result = await worker.score({"completion": "7", "input": "?", "answer": "7"}, 60.0)
        finally:
            await worker.close()
    assert result.status is RewardStatus.FAILED or kind == "mentions"
    assert watch.longest_s < LONGEST_TURN_S, (watch.longest_s, result.reason)


async def test_the_watch_sees_a_loop_that_is_held_up():
    async with LoopWatch() as watch:
        began_s = time.process_time()
        while time.process_time() - began_s < 0.2:
            pass
        await asyncio.sleep(0)
    assert watch.longest_s >= 0.19
