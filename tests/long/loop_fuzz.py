"""Hostile inputs of up to 4 MB for everything that the controller's event loop reads, and the longest turn that one costs.

    nice -n 15 python -W ignore -m tests.long.loop_fuzz --count 1000

Requests to the endpoint, answers of tools and environments, completions of the policy, replies of judges, and rows. Each
input is played alone, in a loop that measures its turns. A turn counts without the time in which its thread was ready and
got no processor, and at most with what the process computed in it: another program on the machine is not its fault.
Prints the longest turn of each kind; the exit status is 1 if one took longer than `--limit-s`.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from async_grpo.environments.call_reader import CallReader
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.openai_server.endpoint import AgentEndpoint
from async_grpo.environments.played import Played
from async_grpo.environments.programs import Play, UseTools
from async_grpo.environments.trajectory import TrajectoryRecorder
from async_grpo.environments.trajectory_client import TrajectoryClient, trusted_messages
from async_grpo.experience.rollouts import reward_sample
from async_grpo.experience.step_metrics import readable_samples, step_stats
from async_grpo.metrics.writer import as_json
from async_grpo.modeling.load import load_tokenizer
from async_grpo.rewards.builtin import countdown, text
from async_grpo.rewards.http.endpoint import BadReply
from async_grpo.rewards.isolation.lines import Lines, encode_line
from async_grpo.rewards.judges import LLMJudge
from async_grpo.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    RewardStatus,
    Sample,
    Sampling,
    Session,
    Verdict,
)

MODEL = Path(__file__).parents[2] / "sample-data" / "tiny-model"
SCHEMA = {"type": "object", "properties": {"score": {"type": "number"}}, "required": ["score"]}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ (m['content'] or '') | trim }}{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MAX_BYTES = 4 * 2**20
CONTEXT_TOKENS = 2**20  # such a context lets requests of 4 MB in
LIMITS = TrajectoryLimits(4, CONTEXT_TOKENS, None, 600.0, 300)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
UNITS = [
    *(
        "a",
        " ",
        "\n",
        "\t",
        "0",
        "<",
        ">",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "\\",
        "/",
        ",",
        ".",
        ":",
        "é",
        "中",
        "🙂",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_call>{",
        "{}</tool_call>",
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|im_",
        "```",
    ),
    *(
        "<answer>",
        "</answer>",
        "\\boxed{",
        "Score: 1\n",
        '{"a": ',
        "1+",
        "((",
        "word and ",
        "\u200b",
        "\x1c",
        "x = 1\n",
    ),
    CALL,
]


class MeteredLoop(asyncio.SelectorEventLoop):
    """An event loop that measures its turns."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = self.longest_wall_s = 0.0
        select, self._waited_s = self._selector.select, 0.0  # type: ignore[attr-defined]

        def timed_select(timeout: float | None = None) -> Any:
            begun = time.monotonic()
            try:
                return select(timeout)
            finally:
                self._waited_s += time.monotonic() - begun

        self._selector.select = timed_select  # type: ignore[attr-defined]

    def _run_once(self) -> None:
        begun, computed_s, starved_s, waited_s = (
            time.monotonic(),
            time.process_time(),
            _starved_s(),
            self._waited_s,
        )
        super()._run_once()  # type: ignore[misc]
        wall_s = time.monotonic() - begun - (self._waited_s - waited_s)
        self.longest_wall_s = max(self.longest_wall_s, wall_s)
        blamed_s = min(wall_s - (_starved_s() - starved_s), time.process_time() - computed_s)
        self.longest_s = max(self.longest_s, blamed_s)


async def begin_to_measure() -> None:
    """Forget the turns so far, in which the input was made."""
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MeteredLoop)
    loop.longest_s = loop.longest_wall_s = 0.0


def _starved_s() -> float:
    with suppress(OSError):
        status = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
        return int(status.split()[1]) / 1e9
    return 0.0


def repeated(dice: random.Random, size: int) -> str:
    """Return a text of so many bytes or a little fewer, of a few units again and again."""
    units = dice.sample(UNITS, dice.choice([1, 1, 2, 3]))
    beginning = dice.choice(["", "", "<tool_call>{", "x", '"'])
    unit = "".join(units)
    return beginning + unit * (size // len(unit.encode()))


class Says:
    """A `Generation` that says the texts, one after the other, the last one again and again."""

    def __init__(self, chat: Chat, *texts: str) -> None:
        self._chat, self._texts, self._count = chat, texts, 0

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None, session: Session | None = None
    ) -> AsyncIterator[Completion]:
        said = self._texts[min(self._count, len(self._texts) - 1)]
        self._count += 1
        ids = self._chat.encode(
            said[:1000]
        )  # an engine's ids come as they are; their text is as long as it is
        values = np.zeros(len(ids), np.float32)
        yield Completion(ids, values, np.zeros(len(ids), np.int32), FinishReason.STOP, said)

    async def take_stats(self) -> dict[str, Any]:
        return {}


class Answers:
    """In place of `EnvironmentProcesses`: each call is answered by a line of JSON, read as a process's are."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._line = encode_line({"answers": [answer]}) + b"\n"
        self.seconds = 0.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator["Answers"]:
        yield self

    async def call(self, name: str, *arguments: Any) -> dict[str, Any]:
        await asyncio.sleep(0)  # a process never answers within the turn that asks it
        encode_line({"call": name, "arguments": arguments})
        (message,) = Lines().feed(self._line)
        return dict(message["answers"][0])


def prompt_of(row: dict[str, Any]) -> Prompt:
    return Prompt(0, np.array([5], np.int32), {"input": "3+4=", **row})


class Fuzz:
    """One input of a kind, of about `size` bytes, made by the dice."""

    def __init__(self, dice: random.Random, size: int, chat: Chat) -> None:
        self.dice, self.size, self.chat = dice, size, chat

    def text(self, share: float = 1.0) -> str:
        return repeated(self.dice, int(self.size * share))

    # Requests

    def chat_body(self) -> bytes:
        size, dice = self.size, self.dice
        message = {
            "role": dice.choice(["user", "assistant", "tool", "x"]),
            "content": dice.choice(["", "a", None]),
        }
        shape = dice.randrange(12)
        body: dict[str, Any] = {"messages": [message], "n": dice.choice([None, 1, 8, 64])}
        if shape <= 2:
            message["content"] = self.text()
        elif shape == 3:
            body["messages"] = [message] * (size // 40)
        elif shape == 4:
            message["content"] = [{"type": "text", "text": dice.choice(["", "x", "<|im_"])}] * (size // 30)
        elif shape == 5:
            body["tools"] = [{"type": "function", "function": {"name": "f"}}] * (size // 50)
        elif shape == 6:
            function = {"name": "f", "arguments": dice.choice([self.text(), "[" * size, {"a": self.text()}])}
            message |= {"role": "assistant", "tool_calls": [{"function": function}]}
        elif shape == 7:
            message["more"] = dice.choice(
                [[[]] * (size // 4), {str(n): 1 for n in range(size // 12)}, self.text()]
            )
        elif shape == 8:
            body["tools"] = [{"type": "function", "function": {"name": "f", "description": self.text()}}]
        elif shape == 9:
            body |= {"stop": [self.text(0.1)] * 9, "model": self.text(0.1)}
        elif shape == 10:
            body["messages"] = [message, {**message, "content": self.text(1 / 64)}] * 64
        else:
            return dice.choice(
                [b"[" * size, b"[" + b"[]," * (size // 3) + b"1]", self.text().encode(), b'"' * size]
            )
        return json.dumps(body, ensure_ascii=dice.random() < 0.5).encode()

    def completion_body(self) -> bytes:
        size = self.size
        prompt: Any = self.dice.choice(
            [
                self.text(),
                self.text(),
                [7] * (size // 3),
                ["a"] * (size // 5),
                [[1]] * (size // 5),
                [2.5] * (size // 5),
            ]
        )
        return json.dumps({"prompt": prompt, "n": self.dice.choice([1, 1, 64])}).encode()

    def result_body(self) -> bytes:
        numbers = {str(number): number for number in range(self.size // 15)}
        result = self.dice.choice(
            [{"failure": self.text()}, {"reward": 1, "numbers": numbers}, {"reward": self.text()}]
        )
        return json.dumps(result).encode()

    async def request(self, path: str, body: bytes) -> None:
        await begin_to_measure()
        endpoint = AgentEndpoint()
        await endpoint.start()
        policy = self.policy("hm")
        key, _ = endpoint.open(policy)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        if self.dice.random() < 0.1:
            headers["Content-Type"] += (
                f"; charset={self.dice.choice(['punycode', 'utf-7', 'idna', 'utf-16'])}"
            )
        async with aiohttp.ClientSession() as session:
            url = f"{endpoint.base_url}/{path}"
            async with session.post(url, data=body, headers=headers) as answer:
                if answer.status >= 500:
                    raise RuntimeError(f"status {answer.status}: {(await answer.text())[:300]}")
                await answer.read()
        await endpoint.close()

    # What comes back from elsewhere

    def policy(self, *says: str, row: dict[str, Any] | None = None) -> TrajectoryClient:
        prompt = prompt_of(row or {})
        recorder = TrajectoryRecorder(self.chat, trusted_messages(prompt))
        return TrajectoryClient(Says(self.chat, *says), recorder, prompt, 0, LIMITS)  # type: ignore[arg-type]

    async def play(self, program: Any, *says: str, row: dict[str, Any] | None = None) -> None:
        await begin_to_measure()
        generation: Any = Says(self.chat, *says)
        playing = Played(generation, program, self.chat, LIMITS)
        prompt = prompt_of(row or {})
        async for completion in playing.generate(prompt, 1):
            self.score_and_write(prompt, completion)

    async def tool_answer(self) -> None:
        answer = {"status": "ok", "answer": self.text(), "failed": False, "schemas": [{"type": "function"}]}
        processes: Any = Answers(answer)
        await self.play(UseTools(processes), CALL, CALL, "so it is 2")

    async def environment_text(self) -> None:
        message = {"role": "user", "content": self.text(1 / 64)}
        observation = self.dice.choice(
            [self.text(), [message] * 64, [{"role": "user", "content": ""}] * (self.size // 40)]
        )
        answer = {
            "status": "ok",
            "observation": observation,
            "state": "",
            "numbers": {},
            "reward": 0.5,
            "done": False,
        }
        processes: Any = Answers(answer)
        row = self.dice.choice([{}, {"messages": [{"role": "user", "content": "a"}]}])
        await self.play(Play(processes, 0), "hm", row=row)

    async def completion(self) -> None:
        processes: Any = Answers(
            {"status": "ok", "answer": "2", "failed": False, "schemas": [{"type": "function"}]}
        )
        await self.play(UseTools(processes), self.text(), "so it is 2")

    async def row(self) -> None:
        texts = {"input": self.text(0.5), "answer": self.text(0.2), "numbers": [1] * (self.size // 20)}
        row = json.loads(json.dumps(texts))
        processes: Any = Answers({"status": "ok", "answer": "2", "failed": False, "schemas": []})
        await self.play(UseTools(processes), "so it is 2", row=row)

    async def judge_reply(self) -> None:
        text = f"Score: 1 {self.text()}"
        body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})
        await begin_to_measure()
        for options in ({"pattern": r"Score:\s*(\d+)"}, {"json_schema": SCHEMA}):
            judge = LLMJudge(url="http://127.0.0.1:9", model="m", **options)
            with suppress(BadReply):  # too long, or without a score
                await judge._read(json.loads(body), 1)

    def score_and_write(self, prompt: Prompt, completion: Completion) -> None:
        """Do with a completion what the loop does: inline rewards, a message to a reward's process, metrics, samples."""
        sample = reward_sample(prompt, completion)
        for reward in (countdown.score, text.format):
            with suppress(KeyError, TypeError, ValueError):
                reward(sample)
        encode_line(sample)
        verdict = Verdict(RewardStatus.OK, 1.0)
        scored = Sample(prompt, completion, verdict, completion.logprobs, None, len(completion))
        group = Group(prompt, (dataclasses.replace(scored, advantages=None),), 0, 0)
        if len(completion):
            step_stats(0, [group], 1, 1)
        for line in readable_samples([group]):
            as_json(line)


KINDS: dict[str, tuple[int, Callable[[Fuzz], Coroutine[Any, Any, None]]]] = {  # how often of a thousand
    "endpoint: chat": (300, lambda fuzz: fuzz.request("chat/completions", fuzz.chat_body())),
    "endpoint: completions": (120, lambda fuzz: fuzz.request("completions", fuzz.completion_body())),
    "endpoint: result": (60, lambda fuzz: fuzz.request("result", fuzz.result_body())),
    "tool's answer": (120, Fuzz.tool_answer),
    "environment's text": (120, Fuzz.environment_text),
    "completion": (120, Fuzz.completion),
    "judge's reply": (100, Fuzz.judge_reply),
    "row": (60, Fuzz.row),
}


def attack(
    count: int, seed: int, max_bytes: int = MAX_BYTES, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, list[tuple[float, float, int]]]:
    """Return for each kind the longest turn of each input: blamed seconds, wall seconds, the input's number."""
    dice = random.Random(seed)
    tokenizer = load_tokenizer(MODEL)
    tokenizer.chat_template = TEMPLATE
    chat = Chat(tokenizer, CONTEXT_TOKENS, make_reader=partial(CallReader, tool_parser="hermes"))
    weights = [KINDS[kind][0] for kind in kinds]
    found = defaultdict[str, list[tuple[float, float, int]]](list)
    for number in range(count):
        (kind,) = dice.choices(kinds, weights)
        size = max_bytes if dice.random() < 0.25 else int(1000 * (max_bytes / 1000) ** dice.random())
        case = Fuzz(random.Random(f"{seed} {number}"), size, chat)
        loop = MeteredLoop()
        with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:
            runner.run(KINDS[kind][1](case))
        found[kind].append((loop.longest_s, loop.longest_wall_s, number))
    return found


def main() -> int:
    """Run the fuzz of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    parser.add_argument("--limit-s", type=float, default=0.5)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    found = attack(options.count, options.seed, options.max_bytes, options.kinds)
    longest_s = 0.0
    for kind, turns in found.items():
        blamed_s, _, number = max(turns)
        wall_s = max(wall for _, wall, _ in turns)
        longest_s = max(longest_s, blamed_s)
        print(
            f"{kind:24} {len(turns):5} inputs, longest turn {blamed_s:.3f} s (input {number}), {wall_s:.3f} s by the clock"
        )
    print(f"{'all':24} {options.count:5} inputs, longest turn {longest_s:.3f} s; allowed {options.limit_s} s")
    return int(longest_s > options.limit_s)


if __name__ == "__main__":
    sys.exit(main())
