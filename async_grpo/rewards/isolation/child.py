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
import inspect
import itertools
import json
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

from async_grpo.options.redaction import redact_output, register_secrets
from async_grpo.processes.process_tree import split_off_guardian
from async_grpo.rewards.adapter.decorators import AdapterTraits, accepted_options, function_of, traits_of
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.adapter.result import describe, failure, read_answer, read_change
from async_grpo.rewards.isolation.lines import Lines, Message, encode_line

if TYPE_CHECKING:
    import asyncio

RECEIVE_BYTES = 2**18

Answers = list[dict[str, Any]]  # as `result.read_answer` makes them


def main(channel_fd: int, parent_pid: int, max_processes: int) -> None:
    """Below a guardian (see `process_tree`), serve until the parent closes the channel."""
    split_off_guardian(parent_pid, channel_fd, max_processes)
    os.set_inheritable(channel_fd, False)  # a program started by the reward must not keep the channel open
    with socket.socket(fileno=channel_fd) as channel:
        if not (first := channel.makefile("rb").readline()):
            return
        greeting = json.loads(first)["greeting"]
        _hide(greeting["secret_variables"])
        server = Server(channel, greeting["max_message_bytes"])
        run: Callable[..., None] = run_plain
        try:
            _limit_resources(greeting["memory_limit_bytes"])
            is_async, make = resolve_name(greeting["host"])(greeting)
            if is_async:
                from asyncio import run
        except BaseException as error:  # the parent must learn the reason, whatever the user's file raised
            server.send({"id": 0, "error": describe(error)})
            return
        run(server.serve(make))


def _hide(secret_variables: Sequence[str]) -> None:
    """Keep their values out of what this process answers, logs and prints."""
    if secret_variables:
        register_secrets(os.environ[name] for name in secret_variables)
        redact_output()


def hosted_reward(greeting: Message) -> tuple[bool, Callable[[], "Reward"]]:
    """Whether it needs an event loop, and what makes it there."""
    name = greeting["adapter"]
    adapter = resolve(RewardRegistrySource.from_dict(greeting["source"]), [name])[name]
    return traits_of(adapter).is_async, partial(Reward, adapter, greeting["options"])


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
        self._channel.sendall(encode_line(message, self._max_bytes) + b"\n")

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
    """What serves requests in such a process: a reward, or something else (`greeting["host"]` names what makes it)."""

    traits: AdapterTraits

    async def call(self, method: str, *arguments: Any) -> Any:
        """`warm_up` before the first request, `close` after the last."""

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """For each request its answers; nothing is raised."""


class Reward:
    """A `Host`: a registered object with the options that it names; a class is built. `run_plain` runs what awaits nothing.

    >>> reward = Reward(lambda sample, weight=1.0: weight * sample["value"], {"weight": 2.0, "url": "x"})
    >>> run_plain(reward.replies([{"sample": {"value": 3}}]))[0][0]["reward"]
    6.0
    """

    def __init__(self, adapter: Any, options: Mapping[str, Any]) -> None:
        self.traits = traits_of(adapter)
        if isinstance(adapter, type):
            adapter = adapter(**accepted_options(adapter, options, num_given=0))
        self._adapter = adapter
        self._function = _refuse_judge if self.traits.is_judge else function_of(adapter)
        self._options = accepted_options(self._function, options)

    async def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the registered object returns; None if it has none of this name."""
        returned = getattr(self._adapter, method, lambda: None)(*arguments)
        return await returned if inspect.isawaitable(returned) else returned

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """For each request its answers: one for each sample or member, whatever happens."""
        if "group" in requests[0]:
            return [await self._post_processed(requests[0]["group"])]
        # Copies: steps are measured on the samples as they were, whatever the reward writes into its own.
        samples = [dict(request["sample"]) for request in requests]
        returned: Any
        try:
            returned = self._function(samples if self.traits.is_batch else samples[0], **self._options)
            if inspect.isawaitable(returned):
                returned = await returned
        except BaseException as error:  # sys.exit() and time-outs of libraries would end the process
            if len(requests) == 1 or not isinstance(error, Exception | SystemExit):
                return [[failure(describe(error))] for _ in requests]
            return [answers for request in requests for answers in await self.replies([request])]
        if not self.traits.is_batch:
            returned = [returned]
        if wrong := _misfit(returned, len(requests)):
            return [[failure(f"the batch of {len(requests)} samples came to {wrong}")] for _ in requests]
        return [[self._read(*pair)] for pair in zip(returned, requests, strict=True)]

    async def _post_processed(self, group: Sequence[Message]) -> Answers:
        """What `post_process_scores` makes of a group's answers (see `decorators.post_process`)."""
        answers = [{name: member[name] for name in member if name != "sample"} for member in group]
        if not self.traits.has_post_process:
            return answers
        try:
            returned = await self.call("post_process_scores", [dict(member) for member in group])
            if wrong := _misfit(returned, len(group)):
                raise ValueError(f"a group of {len(group)} came to {wrong}")
            return [read_change(change, answer) for change, answer in zip(returned, answers, strict=True)]
        except BaseException as error:
            return [failure(f"post_process_scores: {describe(error)}")] * len(group)

    def _read(self, returned: Any, request: Message) -> dict[str, Any]:
        try:
            return read_answer(returned, request["sample"], self.traits.is_process_reward)
        except Exception as error:  # a number too large for a float, a dict that is none
            return failure(describe(error))


def run_plain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that needs no event loop; where it does, a TypeError is raised in it."""
    try:
        coroutine.send(None)
        while True:
            coroutine.throw(TypeError("it awaits, so it must be declared `async def`"))
    except StopIteration as done:
        return done.value


def _refuse_judge(sample: Any) -> None:
    raise TypeError("a judge is asked over the network by the pool itself, not in a process of its own")


def _misfit(returned: Any, num_wanted: int) -> str:
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__}, not a list"
    return "" if len(returned) == num_wanted else f"{len(returned)} answers"


def _limit_resources(memory_limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the machine runs out of memory, the kernel is to take a verifier and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
