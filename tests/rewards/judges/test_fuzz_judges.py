"""A few of the replies of `tests/long/fuzz_judges.py`: none holds up the loop in which all judges are asked."""

import asyncio
import json
import threading
import time

import hostile_server as hostile
import pytest
from hostile_server import HostileServer

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.http.endpoint import Endpoint
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges import GenerativeRM, HTTPScorer, LLMJudge, reading
from async_grpo.types import RewardStatus
from tests.long.fuzz_judges import LONGEST_TURN_S, SCHEMA, SLOW_PATTERN, LoopWatch, fuzz

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


VOTES = {"votes": 64, "one_request": True, "temperature": 0.7}
NESTED = {
    "type": "object",
    "properties": {"score": {"type": "number"}, "xs": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["score"],
    "$defs": {
        "node": {"anyOf": [{"required": ["b"]}, {"properties": {"a": {"$ref": "#/$defs/node"}}}]},
    },
}
# Each takes far longer than its budget if nothing stops it
SLOW_READINGS = {
    "a pattern": ({"pattern": SLOW_PATTERN}, "Score: 1 " * 2_700 + "x"),
    "a schema": ({"json_schema": NESTED}, '{"score": 1, "xs": [' + ",".join(['{"a":{}}'] * 2_500) + "]}"),
    "a schema with its dialect": (
        {"json_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema"} | NESTED},
        '{"score": 1, "xs": [' + ",".join(['{"a":{}}'] * 2_500) + "]}",
    ),
}


@pytest.mark.parametrize("kind", SLOW_READINGS)
async def test_many_choices_that_take_long_leave_the_loop_free_and_share_one_budget(kind, monkeypatch):
    monkeypatch.setattr(reading, "READ_S", 0.5)
    options, text = SLOW_READINGS[kind]
    judge = LLMJudge(url="http://127.0.0.1:9", model="m", **VOTES, **options)
    choice = {"message": {"content": text}, "finish_reason": "stop"}
    threads_before = set(threading.enumerate())
    begun_s = time.process_time()
    async with LoopWatch() as watch:
        votes, reasons = await judge._read({"choices": [choice] * judge.votes}, judge.votes)
    took_s = time.process_time() - begun_s
    assert len(votes) + len(reasons) == judge.votes and "takes more than 0.5 s" in reasons[-1]
    assert watch.longest_s < LONGEST_TURN_S and took_s < 2.0, (watch.longest_s, took_s)
    new_threads = set(threading.enumerate()) - threads_before
    assert not [thread for thread in new_threads if thread.name.startswith("asyncio")]


async def test_the_choices_of_a_reply_are_bounded_together():
    judge = LLMJudge(url="http://127.0.0.1:9", model="m", **VOTES)
    choice = {"message": {"content": "x" * 25_000 + "\nScore: 1"}, "finish_reason": "stop"}
    votes, reasons = await judge._read({"choices": [choice] * 64}, 64)
    assert not votes and len(reasons) == 64 and "too long together: 1600576 characters" in reasons[0]


def test_a_schema_that_compares_all_items_is_refused():
    items = {"type": "array", "uniqueItems": True}
    schema = {
        "type": "object",
        "properties": {"score": {"type": "number"}, "xs": items},
        "required": ["score"],
    }
    with pytest.raises(ConfigurationError, match="uniqueItems.*leave it out"):
        LLMJudge(url="http://127.0.0.1:9", model="m", json_schema=schema)
    items["uniqueItems"] = False
    LLMJudge(url="http://127.0.0.1:9", model="m", json_schema=schema)


async def test_the_watch_sees_a_loop_that_is_held_up():
    async with LoopWatch() as watch:
        began_s = time.process_time()
        while time.process_time() - began_s < 0.2:
            pass
        await asyncio.sleep(0)
    assert watch.longest_s >= 0.19
