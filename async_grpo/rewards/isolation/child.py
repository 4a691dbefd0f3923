"""The main program of one reward's process: `main` with a descriptor, the parent's id and a limit of processes.

It splits into a guardian (see `process_tree`) and the process proper, which reads requests from its end of a socket pair
and answers each, in order:

    {"id": 7, "samples": [...]}     ->  {"id": 7, "answers": [...]}, one for each
    {"id": 8, "group": [...]}       ->  the same, after `post_process_scores`
    {"cancel": 7}                   request 7 is not served if its turn has not come; an async reward lets go of it.
                                    It is answered all the same
    {"begun": [7, 9]}               from a batched reward: these are now served by one call

The reward runs in this process's main thread, where libraries may use signals; what it prints goes to stderr. Only the
standard library is imported before the reward is.
"""

import contextlib
import inspect
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from async_grpo.processes.process_tree import split_off_guardian
from async_grpo.rewards.adapter.decorators import AdapterTraits, accepted_options, function_of, traits_of
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.adapter.result import describe, failure, read_answer, read_change
from async_grpo.rewards.isolation.framing import Frames, MessageTooLarge, encode

RECEIVE_BYTES = 2**18

Answers = list[dict[str, Any]]  # as `result.read_answer` makes them
Message = dict[str, Any]


def main(channel_fd: int, parent_pid: int, max_processes: int) -> None:
    """Greet, then serve until the parent closes the channel."""
    split_off_guardian(parent_pid, channel_fd, max_processes)
    os.set_inheritable(channel_fd, False)  # a program started by the reward must not keep the channel open
    with socket.socket(fileno=channel_fd) as channel:
        inbox = Inbox(channel)
        while not inbox.waiting and inbox.receive():
            pass
        if inbox.waiting:
            _serve(inbox, inbox.waiting.pop())


def _serve(inbox: "Inbox", greeting: Message) -> None:
    options, max_bytes = greeting["options"], greeting["max_message_bytes"]
    try:
        _limit_resources(greeting["memory_limit_bytes"])
        name = greeting["adapter"]
        adapter = resolve(RewardRegistrySource.from_dict(greeting["source"]), [name])[name]
        is_async = traits_of(adapter).is_async
    except BaseException as error:  # the parent must learn the reason, whatever the user's file raised
        inbox.channel.sendall(encode({"error": describe(error)}, max_bytes))
        return
    if is_async:  # it brings in asyncio, which no other reward needs
        from async_grpo.rewards.isolation.async_child import serve

        serve(inbox.channel, adapter, options, max_bytes)
        return
    reward, reply = run_plain(build(adapter, options))
    inbox.channel.sendall(encode(reply, max_bytes))
    if reward is None:
        return
    while requests := inbox.next_call(reward.traits):
        if reward.traits.is_batch:
            inbox.channel.sendall(encode({"begun": [request["id"] for request in requests]}, max_bytes))
        answers = run_plain(reward.replies(requests))
        for request, part in zip(requests, answers, strict=True):
            inbox.channel.sendall(reply_frame(request["id"], part, max_bytes))
    run_plain(reward.close())


class Inbox:
    """The requests that lie in the channel, in their order, less those that are cancelled before their turn."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.waiting: list[Message] = []
        self._frames = Frames(sys.maxsize)  # the parent keeps to its limit
        self._poll = select.poll()  # `select` takes no descriptor above 1023, and rewards may open many
        self._poll.register(channel, select.POLLIN)

    def receive(self, timeout_s: float | None = None) -> bool:
        """Read what has come, or wait for it. False when nothing came in time, or nothing will come any more."""
        if timeout_s is not None and not self._poll.poll(1000 * timeout_s):
            return False
        piece = self.channel.recv(RECEIVE_BYTES)
        for message in self._frames.feed(piece):
            if "cancel" in message:
                self._cancel(message["cancel"])
            else:
                self.waiting.append(message)
        return bool(piece)

    def next_call(self, traits: AdapterTraits) -> list[Message]:
        """What the reward is to be called with next: one request, or those of a batch; empty at the end."""
        while self.receive(0.0):  # also the cancellations of what waits
            pass
        while self.waiting or self.receive():
            if self.waiting:
                size = self._gather(traits)
            if self.waiting:
                return self._take(size)
        return []

    def _gather(self, traits: AdapterTraits) -> int:
        """Wait until a batch is full, or its first request was sent `max_wait_s` ago; returns its size."""
        if not traits.is_batch or "samples" not in self.waiting[0]:
            return 1
        until = self.waiting[0]["at"] + traits.max_wait_s
        while len(self.waiting) < traits.capacity and self.receive(max(0.0, until - time.monotonic())):
            pass
        return traits.capacity

    def _take(self, size: int) -> list[Message]:
        """The first requests, of one sort."""
        sort = "samples" in self.waiting[0]
        count = 0
        while count < min(size, len(self.waiting)) and ("samples" in self.waiting[count]) is sort:
            count += 1
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def _cancel(self, number: int) -> None:
        if any(request["id"] == number for request in self.waiting):
            self.waiting = [request for request in self.waiting if request["id"] != number]
            self.channel.sendall(reply_frame(number, [failure("cancelled")], sys.maxsize))


class Reward:
    """A registered object with the options that it names; a class is built.

    The methods are coroutines for the sake of rewards that await; `run_plain` runs them for all others.

    >>> reward = Reward(lambda sample, weight=1.0: weight * sample["value"], {"weight": 2.0, "url": "x"})
    >>> run_plain(reward.replies([{"samples": [{"value": 3}]}]))[0][0]["reward"]
    6.0
    """

    def __init__(self, adapter: Any, options: Mapping[str, Any]) -> None:
        self.traits = traits_of(adapter)
        if isinstance(adapter, type):
            adapter = adapter(**accepted_options(adapter, options, num_given=0))
        self._adapter = adapter
        self._function = _refuse_judge if self.traits.is_judge else function_of(adapter)
        self._options = accepted_options(self._function, options)
        self._pid = os.getpid()

    @property
    def closes(self) -> bool:
        """Whether there is something to do at the end."""
        return callable(getattr(self._adapter, "close", None))

    async def warm_up(self) -> None:
        """Call its `warm_up`, if there is one."""
        await _call(getattr(self._adapter, "warm_up", lambda: None))

    async def close(self) -> None:
        """Call its `close`, if there is one."""
        if self.closes:
            await _call(self._adapter.close)

    async def replies(self, requests: Sequence[Message]) -> list[Answers]:
        """For each request its answers: one for each sample or member, whatever happens."""
        samples = [sample for request in requests for sample in request.get("samples", ())]
        if "group" in requests[0]:
            answers = await self._post_processed(requests[0]["group"])
        elif self.traits.is_batch:
            answers = await self._batched(samples)
        else:
            answers = []
            for sample in samples:
                try:
                    # A copy: steps are measured on the sample as it was, whatever the reward writes into its own.
                    returned = self._function(dict(sample), **self._options)
                    if inspect.isawaitable(returned):
                        returned = await returned
                    answers.append(read_answer(returned, sample, self.traits.is_process_reward))
                except BaseException as error:  # sys.exit() and time-outs of libraries would end the process
                    answers.append(failure(describe(error)))
        if os.getpid() != self._pid:  # a fork made by the reward, which came back like its parent
            os._exit(1)
        if len(requests) == 1:
            return [answers]
        return [[answer] for answer in answers]

    async def _batched(self, samples: Sequence[Message]) -> Answers:
        try:
            returned = await _call(self._function, [dict(sample) for sample in samples], **self._options)
        except BaseException as error:
            if len(samples) == 1 or not isinstance(error, Exception | SystemExit):
                return _all_failed(describe(error), len(samples))
            return [answer for sample in samples for answer in await self._batched([sample])]
        if wrong := _misfit(returned, len(samples)):
            return _all_failed(f"the batch of {len(samples)} samples came to {wrong}", len(samples))
        return [self._read(answer, sample) for answer, sample in zip(returned, samples, strict=True)]

    async def _post_processed(self, group: Sequence[Message]) -> Answers:
        """What `post_process_scores` makes of a group's answers (see `decorators.post_process`)."""
        answers = [{name: member[name] for name in member if name != "sample"} for member in group]
        if not self.traits.has_post_process:
            return answers
        try:
            returned = await _call(self._adapter.post_process_scores, [dict(member) for member in group])
            if wrong := _misfit(returned, len(group)):
                raise ValueError(f"a group of {len(group)} came to {wrong}")
            return [read_change(change, answer) for change, answer in zip(returned, answers, strict=True)]
        except BaseException as error:
            return _all_failed(f"post_process_scores: {describe(error)}", len(group))

    def _read(self, returned: Any, sample: Message) -> dict[str, Any]:
        try:
            return read_answer(returned, sample, self.traits.is_process_reward)
        except Exception as error:  # a number too large for a float, a dict that is none
            return failure(describe(error))


async def build(adapter: Any, options: Mapping[str, Any]) -> tuple[Reward | None, Message]:
    """The reward, warmed up, and the message that greets the parent; no reward and the reason, if it cannot be."""
    try:
        reward = Reward(adapter, options)
        await reward.warm_up()
    except BaseException as error:  # the parent must learn the reason, whatever the user's code raised
        return None, {"error": describe(error)}
    return reward, {"traits": asdict(reward.traits), "closes": reward.closes}


def reply_frame(number: int, answers: Answers, max_bytes: int) -> bytes:
    """The message with the answers to one request."""
    try:
        return encode({"id": number, "answers": answers}, max_bytes)
    except MessageTooLarge as error:
        failed = _all_failed(f"the adapter's answer: {error}", len(answers))
        return encode({"id": number, "answers": failed}, max_bytes)


def run_plain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that needs no event loop; where it does, a TypeError is raised in it."""
    try:
        coroutine.send(None)
        coroutine.throw(TypeError("it awaits, so it must be declared `async def`"))
    except StopIteration as done:
        return done.value
    raise TypeError("it goes on awaiting, and must be declared `async def`")


async def _call(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    returned = function(*arguments, **options)
    return await returned if inspect.isawaitable(returned) else returned


def _refuse_judge(sample: Any) -> None:
    raise TypeError("a judge is asked over the network by the pool itself, not in a process of its own")


def _misfit(returned: Any, num_wanted: int) -> str:
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__}, not a list"
    return "" if len(returned) == num_wanted else f"{len(returned)} answers"


def _all_failed(reason: str, count: int) -> Answers:
    return [failure(reason) for _ in range(count)]


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the machine runs out of memory, the kernel is to take a verifier and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if memory_limit_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
