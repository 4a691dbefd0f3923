"""The main program of one adapter's process.

    python -m async_grpo.rewards.isolation.child CHANNEL_FD PARENT_PID MAX_PROCESSES

It splits into a guardian (see `process_tree`) and the process proper, which reads requests from its end of a socket pair
and answers each:

    {"id": 7, "samples": [...]}     ->  {"id": 7, "answers": [...]}, one for each
    {"id": 8, "group": [...]}       ->  the same, after `post_process_scores`
    {"cancel": 7}                   only to an async reward (see `async_child`), which then answers soon

The reward runs in this process's main thread, where libraries may use signals; what it prints goes to stderr. Only the
standard library is imported before the reward is.
"""

import contextlib
import os
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

from async_grpo.processes.process_tree import split_off_guardian
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, resolve
from async_grpo.rewards.adapter.result import describe
from async_grpo.rewards.adapter.traits import traits_of
from async_grpo.rewards.isolation.calls import built, reply_frame, run_plain
from async_grpo.rewards.isolation.framing import encode, read


def main(channel_fd: int, parent_pid: int, max_processes: int) -> None:
    """Greet, then serve until the parent closes the channel."""
    split_off_guardian(parent_pid, channel_fd, max_processes)
    os.set_inheritable(channel_fd, False)  # a program started by the adapter must not keep the channel open
    with socket.socket(fileno=channel_fd) as channel, channel.makefile("rb") as stream:
        greeting = read(stream.read, sys.maxsize)
        if greeting is not None:
            _serve(channel, stream.read, greeting)


def _serve(channel: socket.socket, receive: Callable[[int], bytes], greeting: dict[str, Any]) -> None:
    options, max_bytes = greeting["options"], greeting["max_message_bytes"]
    try:
        _limit_resources(greeting["memory_limit_bytes"])
        adapter = _adapter(greeting)
        is_async = traits_of(adapter).is_async
    except BaseException as error:  # the parent must learn the reason, whatever the user's page raised
        channel.sendall(encode({"error": describe(error)}, max_bytes))
        return
    if is_async:
        from async_grpo.rewards.isolation.async_child import (
            serve,  # brings in asyncio, which no other reward needs
        )

        serve(channel, adapter, options, max_bytes)
        return
    reward, reply = run_plain(built(adapter, options))
    channel.sendall(encode(reply, max_bytes))
    while reward is not None and (request := read(receive, max_bytes)) is not None:
        answers = run_plain(reward.replies(request))
        channel.sendall(reply_frame(request["id"], answers, max_bytes))
    if reward is not None:
        run_plain(reward.close())


def _adapter(greeting: dict[str, Any]) -> Any:
    name = greeting["adapter"]
    return resolve(RewardRegistrySource.from_dict(greeting["source"]), [name])[name]


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When the machine runs out of memory, the kernel is to take a verifier and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    if memory_limit_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
