"""The process from which sandboxed ones are forked: an interpreter takes 50 ms to start, a fork 2.

    owner -> fork server -> a guardian of each sandboxed process -> that process

Each packet on the socket is a request: the descriptors of the channel for reports, of the order, and of what else the
new process is to have. The server never reads an order: so its children's memory holds no other's.

An order is JSON, with the text to run; a report is a packet of JSON. A process sends its first, the levels of its
confinement, before it looks at the text; after it only one that runs tests can report.
"""

import builtins
import contextlib
import json
import operator
import os
import select
import signal
import socket
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from async_grpo.processes.process_tree import adopt_orphans, die_with, end_descendants, prctl
from async_grpo.rewards.sandbox import unit_test_runner
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS, PR_SET_DUMPABLE, confine
from async_grpo.rewards.sandbox.rpc import RpcChannel, decode, encode

PROGRAM, SOLUTION, TESTS = "__main__", "solution", "tests"  # the modules that texts become
MAX_DESCRIPTORS = 8
MAX_THREADS = 64  # of a sandboxed process (RLIMIT_NPROC would count all of the user)
WATCH_S = 0.05  # between two looks at them
_MUTABLE = (list, dict, set, bytearray)
_PLAIN = (int, float, complex, str, bytes, list, tuple, set, frozenset, dict)


def main(socket_fd: int) -> None:
    """Serve until the other end of the socket is closed. Returns in each new process, too."""
    # What solutions import: once for all of them
    for name in "bisect copy heapq math random re string".split():
        import_module(name)
    sys.path.remove(os.environ["PYTHONPATH"])
    os.environ.clear()
    sys.argv[:] = ["solution.py"]
    prctl(PR_SET_DUMPABLE, 0)  # inherited: sandboxed processes of one user must not read each other's memory
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel collects the guardians
    own_pid = os.getpid()
    with socket.socket(fileno=socket_fd) as requests:
        while True:
            packet, descriptors, _, _ = socket.recv_fds(requests, 1, MAX_DESCRIPTORS)
            if not packet:
                return
            if not os.fork():
                break
            for descriptor in descriptors:
                os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with(own_pid)
    _guard(*descriptors)


def _guard(channel: int, *descriptors: int) -> None:
    """End the sandboxed process if its owner asks or dies, or it has too many threads; report how it ended."""
    adopt_orphans()  # without the filter of system calls it may start processes
    own_pid = os.getpid()
    pid = os.fork()
    if not pid:
        _be_sandboxed(own_pid, channel, *descriptors)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    ends = [os.pidfd_open(pid), channel]  # the owner writes nothing there, but may close it
    while not select.select(ends, [], [], WATCH_S)[0]:
        with contextlib.suppress(OSError):  # a host may hide the processes of others (hidepid)
            if len(os.listdir(f"/proc/{pid}/task")) > MAX_THREADS:
                break
    exit_code = end_descendants()[pid]
    with contextlib.suppress(OSError):  # the owner is gone
        _report(channel, exit_code=exit_code)
    os._exit(0)  # taking an interpreter down in good order takes 10 ms


def _be_sandboxed(parent_pid: int, channel: int, order_fd: int, *descriptors: int) -> None:
    """Do as ordered, with a program's input and output, or the channel between solution and tests."""
    os.setsid()
    with open(order_fd, "rb") as file:
        order: dict[str, Any] = json.loads(file.read())
    os.chdir(order["folder"])
    levels = confine(parent_pid, order["cpu_s"], order["memory_bytes"], order["levels"])
    _report(channel, levels=sorted(levels))
    if not (levels & NETWORK_LEVELS or order["allow_unsandboxed"]):
        return
    kind, text = order["kind"], order["text"]
    if kind == TESTS:
        _report(channel, verdict=unit_test_runner.run(text, RpcChannel(*descriptors)))
        return
    os.close(channel)
    module = sys.modules[kind] = ModuleType(kind)  # data classes look themselves up there
    if kind == SOLUTION:
        _answer(text, module, RpcChannel(*descriptors))
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    exec(compile(text, "solution.py", "exec"), module.__dict__)


def _report(channel: int, **report: Any) -> None:
    os.write(channel, json.dumps(report).encode())


def _answer(code: str, module: ModuleType, channel: RpcChannel) -> NoReturn:
    """Execute the code as a module, then answer the tests' questions until the channel ends (WireError).

    A question is [operation, [arguments], {keywords}], the operation of `operator` or a built-in function. The answer is
    ["value", value, {position: changed argument}] or ["raised", [names of the exception's classes], message].
    If the code raises, sys.exit() included, so does every question.
    """
    objects: dict[int, Any] = {0: module}  # by id: this keeps them alive, and so their ids
    failure: BaseException | None = None

    def refer(value: Any) -> int:
        objects[id(value)] = value
        return id(value)

    def resolve(reference: int | str) -> Any:
        return getattr(builtins, reference) if isinstance(reference, str) else objects[reference]

    def value_of(operation: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        if failure is not None:
            raise failure
        values = [decode(data, resolve) for data in args]
        keywords = {name: decode(data, resolve) for name, data in kwargs.items()}
        compute = _plain if operation == "plain" else getattr(operator, operation, None)
        result = encode((compute or getattr(builtins, operation))(*values, **keywords), refer)
        changed = {}
        for position, (value, data) in enumerate(zip(values, args, strict=True)):
            if type(value) in _MUTABLE and (now := encode(value, refer)) != data:
                changed[str(position)] = now
        return ["value", result, changed]

    try:
        exec(compile(code, "<solution>", "exec"), module.__dict__)
    except BaseException as error:
        failure = error
    while True:
        question = channel.receive()
        try:
            answer = value_of(*question)
        except BaseException as error:  # whatever the tested code raises is an answer, too
            answer = ["raised", [kind.__name__ for kind in type(error).__mro__], ""]
            with contextlib.suppress(Exception):  # a class of the tested code may raise in turn
                answer[2] = str(error)[:1000]
        channel.send(answer)


def _plain(value: Any) -> Any:
    """The value without its class, if that class only refines a plain one: of a named tuple the tuple."""
    kind = next((kind for kind in _PLAIN if isinstance(value, kind)), None)
    if kind is str:
        return str.__str__(value)  # the class of an enumeration has another idea of its text
    return value if kind is None else kind(value)
