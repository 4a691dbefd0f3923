"""Hostile replies of judges, through the real HTTP client and the real judges, against a server of this machine.

    nice -n 15 python -m tests.long.fuzz_judges --replies 600

Judges are asked and read in the event loop of the controller: no reply may hold it up. A violation is a turn of it above
0.5 s, an exception, a call that outlives its deadline, a reason that is too long or cannot be written, or a reward that
nothing in the reply says. Prints each, then the longest turns by shape; the exit status is 1 if there was any violation.

The server runs in a process of its own, so that its work is not counted. The length of a turn is processor time of this
process between two looks of a clock in its loop: whatever other programs the machine runs, and with the time in which a
thread kept the loop from going on.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import random
import re
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from async_grpo.rewards.adapter.result import MAX_REASON_CHARACTERS
from async_grpo.rewards.http.endpoint import Endpoint
from async_grpo.rewards.http.rate_limiter import Limiter
from async_grpo.rewards.judge_worker import JudgeWorker
from async_grpo.rewards.judges import GenerativeRM, HTTPScorer, LLMJudge, RewardModelJudge
from async_grpo.types import AdapterResult, RewardStatus

LONGEST_TURN_S = 0.5
TICK_S = 0.005
START_S = 300.0  # for the server to make its cases
CALL_S, REQUEST_S = 20.0, 2.0
MAX_BYTES = 4 * 2**20  # of one body
SCORE = 7.0  # what an honest reply says, of 10
SCHEMA = {
    "type": "object",
    "properties": {"score": {"type": "number"}, "why": {"type": "string", "pattern": r"^(\w+\s?)*$"}},
    "required": ["score"],
}
MANY_VOTES = 64
SLOW_PATTERN = r"(?s)Score:.*?(\d+)\s*$"  # tries each mention against the whole rest of the text
UNITS = (
    *(" ", "\n", "\t", "\u00a0", "0", "1", "9.", "-", "e", "a", "é", "\u0663", "\U0001f600", "\ud800", "\0"),
    *("(", ")", "[", "]", "{", "}", "<", ">", "\\", '"', "'", "`", "$", ",", ".", ":", "=", "*", "_"),
    *("<think>", "</think>", "<think></think>", r"\boxed{", "```", "```json", "score", "score ", "Score: "),
    *("Score: 1 ", "Score:\n", '{"score": ', '{"score": 1}', '{"a":', "[{", "[[", "1e", "1,", "Score: 7\n"),
)


@dataclass
class Case:
    """One reply: its shape, its bytes as they go over the wire, and whether it may be worth a reward."""

    shape: str
    wire: bytes
    may_score: bool = False
    pause_s: float = 0.0  # between pieces of the wire, for slow replies
    pieces: int = 1
    closes: bool = False  # the connection, after the wire


# Shapes of texts and of JSON


def babble(rng: random.Random, size: int) -> str:
    """Return one unit, or two that take turns, again and again; sometimes with a beginning or an end of another kind."""
    unit = "".join(rng.sample(UNITS, rng.choice([1, 1, 2, 3])))
    text = unit * (size // len(unit) + 1)
    return (
        rng.choice(["", "", "<think>", '{"why": "', "Score: "])
        + text[:size]
        + rng.choice(["", "", "x", "</think>"])
    )


def deep(rng: random.Random, size: int) -> str:
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    depth = rng.choice([100, 900, 5000, size // (len(opening) + 1)])
    return opening * depth + "1" + closing * depth


def wide(rng: random.Random, size: int) -> str:
    """Return many values of a kind, in a list or under names."""
    value = rng.choice(
        ["1", "1.5", "[]", "{}", '""', "null", "true", "1e-400", "9" * 4300, "-1.0e-5", '{"a": 1, "a": 2}']
    )
    if rng.random() < 0.5:
        return "[" + ",".join([value] * (size // (len(value) + 1))) + "]"
    names = size // (len(value) + 12)
    same = rng.random() < 0.2
    return "{" + ",".join(f'"n{0 if same else number:07}":{value}' for number in range(names)) + "}"


def huge_number(rng: random.Random, size: int) -> str:
    digits = "".join(rng.choices("0123456789", k=8)) * (size // 8)
    return rng.choice(
        [digits, f"-{digits}", f"0.{digits}", f"1e{digits}", f"{digits}.5", "1e-400", "NaN", "-Infinity"]
    )


VALUES: tuple[Callable[[random.Random, int], str], ...] = (
    lambda rng, size: json.dumps(babble(rng, size // 2)),
    deep,
    wide,
    huge_number,
)


def bodies(rng: random.Random, size: int) -> tuple[str, bytes]:
    """Return a shape and a body: a reply with a value of that shape in one of the places that judges read."""
    value = rng.choice(VALUES)(rng, size)
    text = json.dumps(rng.choice(VALUES)(rng, size // 2))
    choice = f'{{"message": {{"content": {text[: size // MANY_VOTES - 80].rstrip(chr(92))}"}}, "finish_reason": "stop"}}'
    places = {
        "value": value,
        "many choices": f'{{"choices": [{",".join([choice] * MANY_VOTES)}]}}',
        "unknown field": f'{{"x": {value}}}',
        "content": f'{{"choices": [{{"message": {{"content": {text}}}, "finish_reason": "stop"}}]}}',
        "content, no text": f'{{"choices": [{{"message": {{"content": {value}}}}}]}}',
        "finish_reason": f'{{"choices": [{{"message": {{"content": "x"}}, "finish_reason": {value}}}]}}',
        "choices": f'{{"choices": {value}}}',
        "usage": f'{{"choices": [], "usage": {{"total_tokens": {value}}}}}',
        "logprobs": '{"choices": [{"message": {"content": "Yes"}, "logprobs": '
        f'{{"content": [{{"top_logprobs": {value}}}]}}}}]}}',
        "logprob": '{"choices": [{"message": {"content": "Yes"}, "logprobs": '
        f'{{"content": [{{"top_logprobs": [{{"token": {value}, "logprob": {value}}}]}}]}}}}]}}',
        "data": f'{{"data": {value}}}',
        "probs": f'{{"data": [{{"index": 0, "probs": {value}, "data": {value}}}]}}',
        "scores": f'{{"protocol": 1, "scores": {value}}}',
        "score": f'{{"protocol": 1, "scores": [{value}]}}',
        "reward": f'{{"protocol": 1, "scores": [{{"reward": {value}}}]}}',
        "abstain": f'{{"protocol": 1, "scores": [{{"abstain": {value}}}]}}',
        "error": f'{{"protocol": 1, "id": {value}, "scores": [{{"error": {value}}}]}}',
    }
    place = rng.choice(list(places))
    return place, places[place].encode("utf-8", "surrogatepass")[:MAX_BYTES]


# Shapes on the wire


def http(body: bytes, code: int = 200, **headers: str) -> bytes:
    fields = {"content_length": str(len(body)), "content_type": "application/json", **headers}
    lines = [
        f"HTTP/1.1 {code} Something",
        *(f"{name.replace('_', '-')}: {text}" for name, text in fields.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(body: bytes, size: int, extension: bytes = b"") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    pieces = (body[begin : begin + size] for begin in range(0, len(body), size))
    return (
        head + b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + b"0\r\n\r\n"
    )


@lru_cache
def bomb(megabytes: int, wbits: int) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, wbits)
    pieces = [compressor.compress(b" " * 2**20) for _ in range(megabytes)]
    return b"".join([*pieces, compressor.flush()])


def wires(rng: random.Random, body: bytes) -> tuple[str, bytes, int, float]:
    """Return a shape, the bytes, and in how many pieces they are sent, with which pause."""
    small = body[:20_000]
    kind = rng.choice(["plain"] * 8 + ["gzip", "gzip bomb", "deflate bomb", "br", "two encodings", "UTF-16", "not UTF-8"]
                      + ["small chunks", "chunks of one byte", "chunk extensions", "many headers", "long header", "slow"]
                      + ["slow headers", "error status", "cut off", "cookies"])  # fmt: skip
    match kind:
        case "gzip":
            return kind, http(gzip.compress(body, 1), content_encoding="gzip"), 1, 0.0
        case "gzip bomb":
            return (
                kind,
                http(bomb(rng.choice([5, 200]), 16 + zlib.MAX_WBITS), content_encoding="gzip"),
                1,
                0.0,
            )
        case "deflate bomb":
            wbits = rng.choice([zlib.MAX_WBITS, -zlib.MAX_WBITS])
            return kind, http(bomb(200, wbits), content_encoding="deflate"), 1, 0.0
        case "br":
            return kind, http(small, content_encoding="br"), 1, 0.0
        case "two encodings":
            return kind, http(gzip.compress(bomb(50, 31), 1), content_encoding="gzip, gzip"), 1, 0.0
        case "UTF-16":
            return kind, http(body.decode("utf-8", "replace").encode("utf-16")[:MAX_BYTES]), 1, 0.0
        case "not UTF-8":
            return kind, http(body[:-9] + b"\xff\xfe\xed\xa0\x80" + body[-9:]), 1, 0.0
        case "small chunks":
            return kind, chunked(body, rng.choice([7, 100, 5000])), 1, 0.0
        case "chunks of one byte":
            return kind, chunked(body[: 2**20], 1), 1, 0.0
        case "chunk extensions":
            return kind, chunked(small, 10, b";" + b"x" * 5000), 1, 0.0
        case "many headers":
            return kind, http(small, **{f"x{number}": "y" * 50 for number in range(20_000)}), 1, 0.0
        case "cookies":
            return kind, http(small, set_cookie="a=b; " * 1500), 1, 0.0
        case "long header":
            return kind, http(small, x="y" * 2**20), 1, 0.0
        case "slow":
            return kind, http(small), 20, 0.05
        case "slow headers":
            return kind, http(b"", **{f"x{number}": "y" for number in range(50)}), 30, 0.05
        case "error status":
            code, after = rng.choice([400, 404, 429, 500, 503, 302]), rng.choice(["0", "-1", "1e400", "soon"])
            return kind, http(body, code, retry_after=after), 1, 0.0
        case "cut off":
            return kind, http(body)[: -len(body) // 2], 1, 0.0
    return kind, http(body), 1, 0.0


def honest(rng: random.Random) -> Case:
    """Return a good reply to any of the judges, so that reading is seen to work."""
    choice = {"message": {"content": f"Score: {SCORE:g}"}, "finish_reason": "stop"}
    choice["logprobs"] = {"content": [{"top_logprobs": [{"token": "Yes", "logprob": -0.1}]}]}
    reply = {"choices": [choice], "data": [{"index": 0, "probs": [0.3, 0.7], "data": [0.7]}]}
    reply |= {"protocol": 1, "scores": [{"reward": 0.7}]}
    return Case("honest", http(json.dumps(reply).encode()), may_score=True)


def cases(seed: int, count: int, max_bytes: int = MAX_BYTES) -> Iterator[Case]:
    """Yield the same cases for the same seed."""
    rng = random.Random(seed)
    for number in range(count):
        if number % 20 == 0:
            yield honest(rng)
            continue
        size = rng.choice([1000, 30_000, 70_000, max_bytes // 4, max_bytes - 1000])
        place, body = bodies(rng, size)
        kind, wire, pieces, pause_s = wires(rng, body)
        # A number in the place where one is expected is an answer, whatever it is
        may_score = place in ("probs", "reward", "score", "logprob", "content", "many choices")
        yield Case(f"{kind}, {place}", wire, may_score, pause_s, pieces, closes=kind == "cut off")


# The server


async def serve(seed: int, count: int, max_bytes: int) -> None:
    """Print the port and what the cases are; answer each request with the case whose number is in its body."""
    all_cases = list(cases(seed, count, max_bytes))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1]) if length else 0)
                number = re.search(rb"case (\d+)", body)
                case = all_cases[int(number[1]) if number else 0]
                step = len(case.wire) // case.pieces + 1
                for begin in range(0, len(case.wire), step):
                    writer.write(case.wire[begin : begin + step])
                    await writer.drain()
                    await asyncio.sleep(case.pause_s)
                if case.closes:
                    break
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    facts = [(case.shape, case.may_score) for case in all_cases]
    print(json.dumps({"port": server.sockets[0].getsockname()[1], "cases": facts}), flush=True)
    async with server:
        await server.serve_forever()


@contextlib.asynccontextmanager
async def serving(seed: int, count: int, max_bytes: int) -> AsyncIterator[tuple[str, list[Case]]]:
    """Run the server in a process of its own, which ends with the context; yields its address and cases, without bytes."""
    command = [sys.executable, "-m", "tests.long.fuzz_judges", "--serve", "--seed", str(seed)]
    command += ["--replies", str(count), "--max-bytes", str(max_bytes)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, limit=MAX_BYTES)
    assert process.stdout is not None
    try:
        told = json.loads(await asyncio.wait_for(process.stdout.readline(), START_S))
        yield (
            f"http://127.0.0.1:{told['port']}",
            [Case(shape, b"", may_score) for shape, may_score in told["cases"]],
        )
    finally:
        process.kill()
        await process.wait()


# The judges


def judges_at(url: str) -> dict[str, Any]:
    return {
        "llm": LLMJudge(url=url, model="m"),
        "schema": LLMJudge(url=url, model="m", json_schema=SCHEMA),
        "pattern": LLMJudge(url=url, model="m", pattern=r"(?:\s*\w*)*[Ss]core: (\S+)\s*$"),
        "votes": LLMJudge(
            url=url,
            model="m",
            pattern=SLOW_PATTERN,
            votes=MANY_VOTES,
            one_request=True,
            temperature=0.7,
        ),
        "yes_no": GenerativeRM(url=url, model="m", yes_no=True),
        "classify": RewardModelJudge(url=url, model="m"),
        "scorer": HTTPScorer(url=url),
    }


class LoopWatch:
    """Measures the turns of an event loop, in seconds of this process's processor time."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopWatch":
        self._task = asyncio.create_task(self._look())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            before_s = time.process_time()
            try:
                await asyncio.sleep(TICK_S)
            finally:
                self.longest_s = max(self.longest_s, time.process_time() - before_s)


@dataclass
class Report:
    longest_turn_s: dict[str, float] = field(default_factory=dict)  # by judge and shape
    num_calls: int = 0
    num_scored: int = 0
    violations: list[str] = field(default_factory=list)

    def note(self, judge: str, case: Case, result: AdapterResult, turn_s: float, took_s: float) -> None:
        """Count a call, and what is wrong with it."""
        name = f"{judge}: {case.shape}"
        self.num_calls += 1
        self.num_scored += result.status is RewardStatus.OK
        self.longest_turn_s[name] = max(turn_s, self.longest_turn_s.get(name, 0.0))
        if turn_s > LONGEST_TURN_S:
            self.violations.append(f"{name}: a turn of {turn_s:.2f} s; {result.reason[:200]}")
        if took_s > CALL_S + 10:
            self.violations.append(f"{name}: {took_s:.1f} s; {result.reason[:200]}")
        if len(result.reason) > 3 * MAX_REASON_CHARACTERS:
            self.violations.append(f"{name}: a reason of {len(result.reason)} characters")
        result.reason.encode()  # raises if it cannot be written
        if result.status is RewardStatus.OK and not case.may_score:
            self.violations.append(f"{name}: a reward of {result.reward} that nothing says")
        if (
            case.shape == "honest"
            and judge not in ("schema", "votes")
            and result.status is not RewardStatus.OK
        ):
            self.violations.append(f"{name}: {result.status.value}: {result.reason[:200]}")


async def fuzz(
    seed: int,
    count: int,
    max_bytes: int = MAX_BYTES,
    every_judge: bool = False,
    request_s: float = REQUEST_S,
    at_once: int = 1,
) -> Report:
    """Ask a judge for each case, or each judge; with `at_once` above 1 a turn may be the work of several calls."""
    report, places = Report(), asyncio.Semaphore(at_once)
    async with serving(seed, count, max_bytes) as (url, all_cases):
        workers = {name: worker_of(name, judge, request_s) for name, judge in judges_at(url).items()}
        names = list(workers)

        async def ask(name: str, number: int, case: Case) -> None:
            async with places, LoopWatch() as watch:
                started_s = time.monotonic()
                sample = {"input": "?", "completion": f"case {number}", "answer": "7"}
                result = await workers[name].score(sample, CALL_S)
                took_s = time.monotonic() - started_s
            report.note(name, case, result, watch.longest_s, took_s)

        try:
            async with asyncio.TaskGroup() as calls:
                for number, case in enumerate(all_cases):
                    for name in names if every_judge else [names[number % len(names)]]:
                        calls.create_task(ask(name, number, case))
        finally:
            for worker in workers.values():
                await worker.close()
    return report


def worker_of(name: str, judge: Any, request_s: float) -> JudgeWorker:
    settings = {"timeout_s": request_s, "attempts": 2, "backoff_s": 0.01, "backoff_max_s": 0.02}
    endpoint = Endpoint(judge.endpoint().urls, breaker_failures=10**6, **settings)
    return JudgeWorker(name, judge, endpoint, Limiter(), "train")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replies", type=int, default=600)
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, help="of a body")
    parser.add_argument("--every-judge", action="store_true", help="show each reply to each judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help="be the server, print the port")
    args = parser.parse_args()
    if args.serve:
        asyncio.run(serve(args.seed, args.replies, args.max_bytes))
    report = asyncio.run(fuzz(args.seed, args.replies, args.max_bytes, args.every_judge))
    for text in report.violations:
        print(f"VIOLATION: {text}")
    slowest = sorted(report.longest_turn_s.items(), key=lambda pair: -pair[1])[:10]
    for name, turn_s in slowest:
        print(f"longest turn {turn_s:.3f} s: {name}")
    print(f"{report.num_calls} calls, {report.num_scored} with a reward, {len(report.violations)} violations")
    return int(bool(report.violations))


if __name__ == "__main__":
    sys.exit(main())
