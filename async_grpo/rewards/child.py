"""The main program of one adapter's process: `python -m async_grpo.rewards.child CHANNEL_FD PARENT_PID`.

It reads samples from its end of a socket pair and answers each. The adapter runs in this process's main
thread, where libraries may use signals; what it prints goes to stderr. Only the standard library is imported
before the adapter is.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
from typing import Any

from async_grpo.rewards.contract import accepted_options, answer_of, describe, failure
from async_grpo.rewards.framing import MessageTooLarge, encode, read
from async_grpo.rewards.source import RewardSource, resolve

_PR_SET_PDEATHSIG = 1


def main(channel_fd: int, parent_pid: int) -> None:
    """Greet, then serve until the parent closes the channel."""
    _die_with(parent_pid)
    os.set_inheritable(channel_fd, False)  # a program started by the adapter must not keep the channel open
    with socket.socket(fileno=channel_fd) as channel, channel.makefile("rb") as stream:
        greeting = read(stream.read, sys.maxsize)
        if greeting is not None:
            _serve(channel, stream.read, greeting)


def _serve(channel: socket.socket, receive: Any, greeting: dict[str, Any]) -> None:
    max_bytes = greeting["max_message_bytes"]
    try:
        _limit_resources(greeting["memory_limit_bytes"])
        source = RewardSource(**greeting["source"])
        adapter = resolve(source, [greeting["adapter"]])[greeting["adapter"]]
        options = accepted_options(adapter, greeting["options"])
        getattr(adapter, "warm_up", lambda: None)()
    except BaseException as error:  # the parent must learn the reason, whatever the user's page raised
        channel.sendall(encode({"error": describe(error)}, max_bytes))
        return
    channel.sendall(encode({"ready": True}, max_bytes))
    while (request := read(receive, max_bytes)) is not None:
        answer = answer_of(adapter, request["sample"], options)
        channel.sendall(_encode_answer(answer, max_bytes))


def _encode_answer(answer: dict[str, Any], max_bytes: int) -> bytes:
    try:
        return encode(answer, max_bytes)
    except MessageTooLarge as error:
        return encode(failure(f"the adapter's answer: {error}"), max_bytes)


def _limit_resources(memory_limit_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _die_with(parent_pid: int) -> None:
    """Ask the kernel (Linux) for SIGKILL when the parent dies: an endless loop never looks at its channel."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before it could be watched
        sys.exit(f"the parent process {parent_pid} is gone")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
