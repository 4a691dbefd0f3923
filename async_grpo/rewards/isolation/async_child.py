"""The process of an async reward: many requests at a time, each a task that can be cancelled."""

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from async_grpo.rewards.adapter.result import failure
from async_grpo.rewards.isolation.child import Answers, Message, Reward, build, reply_frame
from async_grpo.rewards.isolation.framing import Frames, encode


def serve(channel: socket.socket, adapter: Any, options: Mapping[str, Any], max_bytes: int) -> None:
    """Build the reward, greet, and answer until the parent closes the channel."""
    asyncio.run(_serve(channel, adapter, options, max_bytes))


async def _serve(channel: socket.socket, adapter: Any, options: Mapping[str, Any], max_bytes: int) -> None:
    reward, reply = await build(adapter, options)  # here, for what it opens may belong to the event loop
    channel.sendall(encode(reply, max_bytes))
    if reward is None:
        return
    channel.setblocking(False)
    server = _Server(reward, max_bytes)
    await asyncio.get_running_loop().create_unix_connection(lambda: server, sock=channel)
    await server.closed
    await reward.close()


class _Server(asyncio.Protocol):
    """Starts a task for each request, or for each batch, one batch after the other.

    A cancelled request is answered, too: so the parent knows that the reward has obeyed.
    """

    def __init__(self, reward: Reward, max_bytes: int) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reward, self._traits, self._max_bytes = reward, reward.traits, max_bytes
        self._frames = Frames(max_bytes)
        self._tasks: dict[int, asyncio.Task[list[Answers]]] = {}  # by the requests that they serve
        self._waiting: list[Message] = []  # for their batch
        self._batch: asyncio.Task[list[Answers]] | None = None
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if "cancel" in message:
                self._cancel(message["cancel"])
            elif self._traits.is_batch and "samples" in message:
                self._waiting.append(message)
                self._start_batch()
            else:
                self._start([message])

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)

    def _start_batch(self) -> None:
        """If none is running, and it is full or its first request was sent `max_wait_s` ago."""
        if self._batch is not None or not self._waiting:
            return
        if self._patience is not None:
            self._patience.cancel()
        wait_s = self._waiting[0]["at"] + self._traits.max_wait_s - time.monotonic()
        if len(self._waiting) < self._traits.capacity and wait_s > 0:
            self._patience = asyncio.get_running_loop().call_later(wait_s, self._start_batch)
            return
        size = self._traits.capacity
        requests, self._waiting = self._waiting[:size], self._waiting[size:]
        self._batch = self._start(requests)
        self._batch.add_done_callback(lambda _: self._end_batch())

    def _end_batch(self) -> None:
        self._batch = None
        self._start_batch()

    def _start(self, requests: Sequence[Message]) -> asyncio.Task[list[Answers]]:
        numbers = [request["id"] for request in requests]
        if self._traits.is_batch:
            self._transport.write(encode({"begun": numbers}, self._max_bytes))
        task = asyncio.create_task(self._reward.replies(requests))
        self._tasks |= dict.fromkeys(numbers, task)
        task.add_done_callback(lambda _: self._reply(numbers, task))
        return task

    def _reply(self, numbers: Sequence[int], task: asyncio.Task[list[Answers]]) -> None:
        replies = [[failure("cancelled")] for _ in numbers] if task.cancelled() else task.result()
        for number, answers in zip(numbers, replies, strict=True):
            del self._tasks[number]
            self._transport.write(reply_frame(number, answers, self._max_bytes))

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()
        elif any(request["id"] == number for request in self._waiting):
            self._waiting = [request for request in self._waiting if request["id"] != number]
            self._transport.write(reply_frame(number, [failure("cancelled")], self._max_bytes))
