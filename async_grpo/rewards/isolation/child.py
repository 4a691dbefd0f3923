"""The main program of a reward's process. It reads requests from its end of a socket pair and answers each of them.

A message is a line of JSON:

    {"id": 0, "at": moment, "greeting": {...}}  ->  {"id": 0, "traits": {...}}, or `error` if it cannot start
    {"id": 7, "at": moment, "sample": {...}}    ->  {"id": 7, "answers": [answer]}
    {"id": 8, "at": moment, "group": [...]}     ->  {"id": 8, "answers": [...]}, after `post_process_scores`
    {"cancel": 7}           drops request 7 if it has not begun, or cancels it if the reward is async. The request is
                            still answered, possibly with an empty list
    {"begun": [7, 9]}       is sent to the parent by a batched reward: one call now serves these requests

`moment` is the time in seconds, on the monotonic clock, at which the parent sent the request. A batched reward waits at
most `max_wait_s` from then on for further requests of its batch.

The reward runs in this process's main thread, because Python allows signal handlers only there. Its output goes to
stderr. To start fast, the process imports no third-party libraries itself, and asyncio only if the reward needs it.
"""

import contextlib
import errno
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

from async_grpo.errors import ConfigurationError
from async_grpo.options.redaction import redact_output, register_secrets
from async_grpo.processes.process_tree import split_off_guardian
from async_grpo.rewards.adapter.decorators import AdapterTraits, accepted_options, function_of, traits_of
from async_grpo.rewards.adapter.pictures import with_decoded_picture
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.adapter.result import describe, failure, read_answer, read_change
from async_grpo.rewards.adapter.trl_signature import has_trl_signature
from async_grpo.rewards.isolation.lines import CHANNEL_CLOSED, Lines, Message, encode_line

if TYPE_CHECKING:
    import asyncio

RECEIVE_BYTES = 2**18

Answers = list[dict[str, Any]]  # in the format of `result.read_answer`


def main(channel_fd: int, parent_pid: int, max_processes: int) -> None:
    """Serve requests until the parent closes the channel, as the child of a guardian process (see `process_tree`)."""
    split_off_guardian(parent_pid, channel_fd, max_processes)
    os.set_inheritable(channel_fd, False)  # a program started by the reward must not keep the channel open
    with socket.socket(fileno=channel_fd) as channel:
        first_line = channel.makefile("rb").readline()
        if not first_line:
            return
        greeting = json.loads(first_line)["greeting"]
        _hide(greeting["secret_variables"])
        server = Server(channel, greeting["max_message_bytes"])
        run: Callable[..., None] = run_plain
        try:
            _limit_resources(greeting["memory_limit_bytes"])
            make_host_factory = resolve_name(greeting["host"])
            is_async, make_host = make_host_factory(greeting)
            if is_async:
                from asyncio import run
        except BaseException as error:  # report any error in the user's file to the parent
            server.send({"id": 0, "error": describe(error)})
            return
        run(server.serve(make_host))


def _hide(secret_variables: Sequence[str]) -> None:
    """Keep the values of these variables out of this process's answers, logs and output."""
    if secret_variables:
        register_secrets(os.environ[name] for name in secret_variables)
        redact_output()


def hosted_reward(greeting: Message) -> tuple[bool, Callable[[], "Reward"]]:
    """Return whether the reward is async, so that it needs an event loop, and a function that creates its `Reward`."""
    name = greeting["adapter"]
    adapter = resolve(RewardRegistrySource.from_dict(greeting["source"]), [name])[name]
    return traits_of(adapter).is_async, partial(Reward, adapter, greeting["options"])


class Server:
    """Serves the requests that arrive on the channel.

    Without an event loop, it makes one call after the other. In an event loop, it runs a task for each request, all at
    the same time. If the reward is batched, it runs a task for one batch at a time.

    Args:
        channel: This process's end of the socket pair.
        max_bytes: Size limit of an answer.
    """

    def __init__(self, channel: socket.socket, max_bytes: int) -> None:
        self._channel = channel
        self._max_bytes = max_bytes
        self._lines = Lines()  # no size limit, because the parent limits its own messages
        self._poll = select.poll()  # unlike `select`, it supports file descriptors above 1023
        self._poll.register(channel, select.POLLIN)
        self._pid = os.getpid()
        self._traits = AdapterTraits()
        self._waiting: list[Message] = []
        # Running tasks, by the number of each request that the task serves
        self._tasks: dict[int, asyncio.Task[list[Answers]]] = {}
        # Set when data has arrived or a task has ended. None without an event loop
        self._woken: asyncio.Event | None = None

    async def serve(self, make: Callable[[], "Host"]) -> None:
        """Create the host, answer the greeting, and answer requests until the parent closes the channel."""
        try:
            reward = make()  # made in the event loop, because its connections may belong to the loop
            await reward.call("warm_up")
        except BaseException as error:  # report any error in the user's code to the parent
            self.send({"id": 0, "error": describe(error)})
            return
        self._traits = reward.traits
        if reward.traits.is_async:
            import asyncio

            self._woken = asyncio.Event()
            asyncio.get_running_loop().add_reader(self._channel, self._woken.set)
        self.send({"id": 0, "traits": asdict(reward.traits)})
        while True:
            if await self._has_data_within(self._time_to_next_call_s()):
                if not self._receive():
                    break
            elif self._time_to_next_call_s() == 0.0:
                requests = self._take_requests()
                if self._woken is None:
                    self._answer(requests, await reward.replies(requests))
                else:
                    self._start(requests, reward.replies(requests))
        await reward.call("close")

    def send(self, message: Message) -> None:
        """Send a message to the parent. Raise ValueError if it is too large."""
        line = encode_line(message, self._max_bytes) + b"\n"
        try:
            self._channel.sendall(line)
        except OSError as error:
            if error.errno in (errno.EBADF, errno.ENOTSOCK):
                # The reward has closed descriptors that it did not open. The exit code tells the parent the reason
                os._exit(CHANNEL_CLOSED)
            raise

    def _receive(self) -> bool:
        """Read the data that has arrived. Return False if the parent has closed the channel, otherwise True."""
        piece = self._channel.recv(RECEIVE_BYTES)
        for message in self._lines.feed(piece):
            number = message.get("cancel")
            if number is None:
                self._waiting.append(message)
            elif number in self._tasks:
                self._tasks[number].cancel()
            else:
                self._drop_waiting(number)
        return bool(piece)

    def _drop_waiting(self, number: int) -> None:
        """Answer a waiting request with an empty list. Do nothing if it has already been answered."""
        for request in self._waiting:
            if request["id"] == number:
                self._waiting.remove(request)
                self._answer([request], [[]])
                return

    def _time_to_next_call_s(self) -> float | None:
        """Return the seconds until the next call may begin, or None if it must wait for a request or the end of a task.

        A batch begins when it is full, or when its first request was sent `max_wait_s` ago.
        """
        if not self._waiting or (self._traits.is_batch and self._tasks):
            return None
        first = self._waiting[0]
        if "group" in first or not self._traits.is_batch or len(self._waiting) >= self._traits.capacity:
            return 0.0
        return max(0.0, first["at"] + self._traits.max_wait_s - time.monotonic())

    async def _has_data_within(self, wait_s: float | None) -> bool:
        """Wait for data from the parent, and return whether it has arrived. The end of a task also ends the wait."""
        if self._woken is not None and wait_s != 0.0:
            import asyncio

            self._woken.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), wait_s)
            wait_s = 0.0
        wait_ms = None if wait_s is None else 1000 * wait_s
        return bool(self._poll.poll(wait_ms))

    def _take_requests(self) -> list[Message]:
        """Remove and return the requests of the next call. Report them to the parent if the reward is batched."""
        first = self._waiting[0]
        max_size = self._traits.capacity if self._traits.is_batch and "sample" in first else 1
        further_samples = itertools.takewhile(lambda request: "sample" in request, self._waiting[1:max_size])
        requests = [first, *further_samples]
        del self._waiting[: len(requests)]
        if self._traits.is_batch:
            self.send({"begun": [request["id"] for request in requests]})
        return requests

    def _start(self, requests: Sequence[Message], replies: Coroutine[Any, Any, list[Answers]]) -> None:
        """Serve requests in a task. Send the answers when the task ends."""
        import asyncio

        def answer_requests(task: "asyncio.Task[list[Answers]]") -> None:
            for request in requests:
                del self._tasks[request["id"]]
            if task.cancelled():  # it was cancelled before it began
                self._answer(requests, [[] for _ in requests])
            else:
                self._answer(requests, task.result())
            assert self._woken is not None, "there is an event loop"
            self._woken.set()

        task = asyncio.create_task(replies)
        for request in requests:
            self._tasks[request["id"]] = task
        task.add_done_callback(answer_requests)

    def _answer(self, requests: Sequence[Message], replies: Sequence[Answers]) -> None:
        if os.getpid() != self._pid:
            # The reward has forked, and this is the forked process, which must not answer
            os._exit(1)
        for request, answers in zip(requests, replies, strict=True):
            try:
                self.send({"id": request["id"], "answers": answers})
            except ValueError as error:  # the answer is too large
                too_large = failure(f"the adapter's answer: {error}")
                self.send({"id": request["id"], "answers": [too_large] * len(answers)})


class Host(Protocol):
    """Interface of the object that answers the requests in a child process.

    The first message of the parent process is the greeting. Under "host", it names a function that gets the greeting and
    returns two things: whether this object is async, and a function that creates it. For rewards, the named function is
    `hosted_reward`.
    """

    traits: AdapterTraits

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host, if it exists: `warm_up` before the first request, `close` after the last request."""

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """Return the answers to each request. This must not raise an error."""


class Reward:
    """The `Host` of a registered reward. It passes the reward each option for which the reward has a parameter.

    If the reward is a class, one object of it is created. `run_plain` can run the coroutines of this class if the
    reward awaits nothing.

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
        _check_arguments(self._function, self._options)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the registered object and return its result. Return None if it has no such method."""
        returned = getattr(self._adapter, method, lambda: None)(*arguments)
        return await returned if inspect.isawaitable(returned) else returned

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """Return the answers to each request, one for each sample or member of a group. This raises no error."""
        if "group" in requests[0]:
            return [await self._post_process(requests[0]["group"])]
        # Pass copies: the reward may change its sample, but the steps that it returns refer to the original one
        samples = [with_decoded_picture(request["sample"]) for request in requests]
        returned: Any
        try:
            returned = self._function(samples if self.traits.is_batch else samples[0], **self._options)
            if inspect.isawaitable(returned):
                returned = await returned
        except BaseException as error:  # neither sys.exit() nor a time-out of a library may end the process
            if len(requests) == 1 or not isinstance(error, Exception | SystemExit):
                return [[failure(describe(error))] for _ in requests]
            # A single sample of the batch may have caused the error, so each sample is tried alone
            replies = []
            for request in requests:
                replies += await self.replies([request])
            return replies
        if not self.traits.is_batch:
            returned = [returned]
        mismatch = _mismatch(returned, len(requests))
        if mismatch:
            return [
                [failure(f"it returned {mismatch} for a batch of {len(requests)} samples")] for _ in requests
            ]
        return [[self._read(value, request)] for value, request in zip(returned, requests, strict=True)]

    async def _post_process(self, group: Sequence[Message]) -> Answers:
        """Return the answers of a group after `post_process_scores` (see `decorators.post_process`)."""
        answers = []
        for member in group:
            answers.append({name: value for name, value in member.items() if name != "sample"})
        if not self.traits.has_post_process:
            return answers
        try:
            members = [member | {"sample": with_decoded_picture(member["sample"])} for member in group]
            returned = await self.call("post_process_scores", members)
            mismatch = _mismatch(returned, len(group))
            if mismatch:
                raise ValueError(f"it returned {mismatch} for a group of {len(group)}")
            return [read_change(change, answer) for change, answer in zip(returned, answers, strict=True)]
        except BaseException as error:
            return [failure(f"post_process_scores: {describe(error)}")] * len(group)

    def _read(self, returned: Any, request: Message) -> dict[str, Any]:
        try:
            return read_answer(returned, request["sample"], self.traits.is_process_reward)
        except Exception as error:
            # A number may be too large for a float, or an object may pretend to be a dict
            return failure(describe(error))


def run_plain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine without an event loop and return its result. If it awaits something, raise a TypeError in it."""
    try:
        coroutine.send(None)
        while True:
            coroutine.throw(TypeError("it awaits, so it must be declared `async def`"))
    except StopIteration as stop:
        return stop.value


def _check_arguments(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse a function that cannot be called with a sample and these options.

    Raises:
        ConfigurationError: The function has no parameter for the sample, or needs further arguments.
    """
    signature = inspect.signature(function)
    try:
        signature.bind({}, **options)
    except TypeError as error:
        advice = ""
        if has_trl_signature(function):
            advice = "; wrap a function with TRL's signature with `trl_reward` of async_grpo.rewards.adapter.trl_signature"
        raise ConfigurationError(
            f"it takes {signature} ({error}): a reward takes one argument, the sample, which is a dict of the row's "
            f"columns and the `completion`. Further parameters need a default or a value in --reward-options{advice}"
        ) from None


def _refuse_judge(sample: Any) -> None:
    raise TypeError("this process cannot score with a judge: `JudgeWorker` sends the requests to its server")


def _mismatch(returned: Any, num_answers: int) -> str:
    """Describe what was returned instead of a list of `num_answers` answers, or return "" if it is such a list."""
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__}, not a list"
    return "" if len(returned) == num_answers else f"{len(returned)} answers"


def _limit_resources(memory_limit_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the machine runs out of memory, the kernel should kill a verifier and not the trainer
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
