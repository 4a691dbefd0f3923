"""The process of an async reward: many requests at a time, each a task that can be cancelled."""

import asyncio
import socket
from collections.abc import Mapping
from functools import partial
from typing import Any

from async_grpo.rewards.adapter.result import failure
from async_grpo.rewards.isolation.calls import Answers, Reward, built, reply_frame
from async_grpo.rewards.isolation.framing import Frames, encode


def serve(channel: socket.socket, adapter: Any, options: Mapping[str, Any], max_bytes: int) -> None:
    """Build the reward, greet, and answer until the parent closes the channel."""
    asyncio.run(_serve(channel, adapter, options, max_bytes))


async def _serve(channel: socket.socket, adapter: Any, options: Mapping[str, Any], max_bytes: int) -> None:
    reward, reply = await built(adapter, options)  # here, for what it opens may belong to the event loop
    channel.sendall(encode(reply, max_bytes))
    if reward is None:
        return
    channel.setblocking(False)
    server = _Server(reward, max_bytes)
    await asyncio.get_running_loop().create_unix_connection(lambda: server, sock=channel)
    await server.closed
    await reward.close()


class _Server(asyncio.Protocol):
    """Starts a task for each request. A cancelled one is answered, too: so the parent knows that it has obeyed."""

    def __init__(self, reward: Reward, max_bytes: int) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reward, self._max_bytes = reward, max_bytes
        self._frames = Frames(max_bytes)
        self._tasks: dict[int, asyncio.Task[Answers]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            if "cancel" in message:
                task = self._tasks.get(message["cancel"])
                if task is not None:  # else its answer and this message have crossed
                    task.cancel()
            else:
                task = asyncio.create_task(self._reward.replies(message))
                self._tasks[message["id"]] = task
                task.add_done_callback(partial(self._reply, message["id"]))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)

    def _reply(self, request_id: int, task: asyncio.Task[Answers]) -> None:
        del self._tasks[request_id]
        answers = [failure("cancelled")] if task.cancelled() else task.result()
        self._transport.write(reply_frame(request_id, answers, self._max_bytes))
