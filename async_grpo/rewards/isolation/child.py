"""The main program of one reward's process, which reads requests from its end of a socket pair and answers each, in order.
A message is a line of JSON:

    {"id": 0, "at": moment, "greeting": {...}}  ->  {"id": 0, "traits": {...}}, or `error` if it cannot start
    {"id": 7, "at": moment, "sample": {...}}    ->  {"id": 7, "answers": [one]}
    {"id": 8, "at": moment, "group": [...]}     ->  {"id": 8, "answers": [...]}, after `post_process_scores`
    {"cancel": 7}           request 7 is not served if its turn has not come; an async reward lets go of it. It is
                            answered all the same, perhaps by none
    {"begun": [7, 9]}       from a batched reward: these are now served by one call

The reward runs in this process's main thread, where libraries may use signals; what it prints goes to stderr. Only the
standard library is imported before the reward is, and asyncio only for a reward that needs it.
"""

import contextlib
import itertools
import json
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from async_grpo.processes.process_tree import split_off_guardian
from async_grpo.rewards.adapter.decorators import AdapterTraits
from async_grpo.rewards.adapter.result import describe, failure

if TYPE_CHECKING:
    import asyncio

RECEIVE_BYTES = 2**18

Answers = list[dict[str, Any]]  # as `result.read_answer` makes them
Message = dict[str, Any]


def main(channel_fd: int, parent_pid: int, max_processes: int) -> None:
    """Below a guardian (see `process_tree`), serve until the parent closes the channel."""
    split_off_guardian(parent_pid, channel_fd, max_processes)
    os.set_inheritable(channel_fd, False)  # a program started by the reward must not keep the channel open
    with socket.socket(fileno=channel_fd) as channel:
        if not (first := channel.makefile("rb").readline()):
            return
        greeting = json.loads(first)["greeting"]
        server = Server(channel, greeting["max_message_bytes"])
        run: Callable[..., None] = run_plain
        try:
            _limit_resources(greeting["memory_limit_bytes"])
            is_async, make = import_module(greeting["host"]).hosted(greeting)
            if is_async:
                from asyncio import run
        except BaseException as error:  # the parent must learn the reason, whatever the user's file raised
            server.send({"id": 0, "error": describe(error)})
            return
        run(server.serve(make))


def encode(message: Any, max_bytes: int = sys.maxsize) -> bytes:
    """As JSON, which holds no line end. Raises ValueError if it is too large, or TypeError for what JSON cannot hold."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > max_bytes:
        raise ValueError(f"a message of {len(body)} bytes exceeds the limit of {max_bytes}")
    return body


class Lines:
    """Puts the pieces of a stream together.

    >>> lines = Lines()
    >>> list(lines.feed(b'{"a":1}\\n{"b"')), list(lines.feed(b':2}\\n'))
    ([{'a': 1}], [{'b': 2}])
    """

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()  # of the line that has not ended

    def feed(self, piece: bytes) -> Iterator[Message]:
        """The messages that end with this piece. Raises ValueError for a line that is too long or no JSON."""
        self._rest += piece
        if b"\n" in piece:
            *lines, self._rest = self._rest.split(b"\n")
            yield from map(json.loads, lines)
        if len(self._rest) > self._max_bytes:
            raise ValueError(f"a message of more than {self._max_bytes} bytes")


class Server:
    """One call after the other; or, in an event loop, a task for each request, and of a batched reward for one batch."""

    def __init__(self, channel: socket.socket, max_bytes: int) -> None:
        self._channel, self._max_bytes = channel, max_bytes
        self._lines = Lines()  # the parent keeps to its limit
        self._poll = select.poll()  # `select` takes no descriptor above 1023
        self._poll.register(channel, select.POLLIN)
        self._pid = os.getpid()
        self._traits = AdapterTraits()
        self._waiting: list[Message] = []
        self._tasks: dict[int, asyncio.Task[list[Answers]]] = {}  # by the requests that they serve
        self._woken: asyncio.Event | None = None  # in an event loop: something has come, or a task has ended

    async def serve(self, make: Callable[[], "Host"]) -> None:
        """Build the reward, greet, and answer until the parent closes the channel."""
        try:
            reward = make()  # here, for what it opens may belong to the event loop
            await reward.call("warm_up")
        except BaseException as error:  # the parent must learn the reason, whatever the user's code raised
            self.send({"id": 0, "error": describe(error)})
            return
        self._traits = reward.traits
        if reward.traits.is_async:
            import asyncio

            self._woken = asyncio.Event()
            asyncio.get_running_loop().add_reader(self._channel, self._woken.set)
        self.send({"id": 0, "traits": asdict(reward.traits)})
        while True:
            if await self._something_came(self._wait_s()):
                if not self._receive():
                    break
            elif self._wait_s() == 0.0:
                requests = self._take()
                if self._woken is None:
                    self._answer(requests, await reward.replies(requests))
                else:
                    self._start(requests, reward.replies(requests))
        await reward.call("close")

    def send(self, message: Message) -> None:
        self._channel.sendall(encode(message, self._max_bytes) + b"\n")

    def _receive(self) -> bool:
        """Read what has come. False when nothing will come any more."""
        piece = self._channel.recv(RECEIVE_BYTES)
        for message in self._lines.feed(piece):
            number = message.get("cancel")
            if number is None:
                self._waiting.append(message)
            elif number in self._tasks:
                self._tasks[number].cancel()
            elif gone := [request for request in self._waiting if request["id"] == number]:
                self._waiting.remove(gone[0])
                self._answer(gone, [[]])
        return bool(piece)

    def _wait_s(self) -> float | None:
        """Until the next call is to begin: a batch when it is full, or its first request was sent `max_wait_s` ago."""
        if not self._waiting or (self._traits.is_batch and self._tasks):
            return None
        first = self._waiting[0]
        if "group" in first or not self._traits.is_batch or len(self._waiting) >= self._traits.capacity:
            return 0.0
        return max(0.0, first["at"] + self._traits.max_wait_s - time.monotonic())

    async def _something_came(self, wait_s: float | None) -> bool:
        """Within so many seconds; in an event loop no longer than until a task ends."""
        if self._woken is not None and wait_s != 0.0:
            import asyncio

            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), wait_s)
            wait_s = 0.0
        return bool(self._poll.poll(None if wait_s is None else 1000 * wait_s))

    def _take(self) -> list[Message]:
        """The requests that the next call serves; says so, where the parent cannot know."""
        size = self._traits.capacity if self._traits.is_batch and "sample" in self._waiting[0] else 1
        rest = itertools.takewhile(lambda request: "sample" in request, self._waiting[1:size])
        taken = [self._waiting[0], *rest]
        del self._waiting[: len(taken)]
        if self._traits.is_batch:
            self.send({"begun": [request["id"] for request in taken]})
        return taken

    def _start(self, requests: Sequence[Message], replies: Coroutine[Any, Any, list[Answers]]) -> None:
        import asyncio

        def ended(task: "asyncio.Task[list[Answers]]") -> None:
            for request in requests:
                del self._tasks[request["id"]]
            none: list[Answers] = [[] for _ in requests]  # it was cancelled before it began
            self._answer(requests, none if task.cancelled() else task.result())
            assert self._woken is not None, "there is an event loop"
            self._woken.set()

        task = asyncio.create_task(replies)
        self._tasks |= {request["id"]: task for request in requests}
        task.add_done_callback(ended)

    def _answer(self, requests: Sequence[Message], replies: Sequence[Answers]) -> None:
        if os.getpid() != self._pid:  # a fork made by the reward, which came back like its parent
            os._exit(1)
        for request, answers in zip(requests, replies, strict=True):
            try:
                self.send({"id": request["id"], "answers": answers})
            except ValueError as error:  # it is too large
                failed = failure(f"the adapter's answer: {error}")
                self.send({"id": request["id"], "answers": [failed] * len(answers)})


class Host(Protocol):
    """What serves requests in such a process: a reward, or something else (`greeting["host"]` names its module)."""

    traits: AdapterTraits

    async def call(self, method: str, *arguments: Any) -> Any:
        """`warm_up` before the first request, `close` after the last."""

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """For each request its answers; nothing is raised."""


def run_plain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that needs no event loop; where it does, a TypeError is raised in it."""
    try:
        coroutine.send(None)
        while True:
            coroutine.throw(TypeError("it awaits, so it must be declared `async def`"))
    except StopIteration as done:
        return done.value


def _limit_resources(memory_limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the machine runs out of memory, the kernel is to take a verifier and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
