"""The fork server, from which sandboxed processes are forked. A fork takes 2 ms, a new interpreter 50 ms.

    owner -> fork server -> a guardian of each sandboxed process -> that process

Each packet on the socket is a request with file descriptors: the channel for reports, the order, and the descriptors of
the new process. An order is a JSON file with the code to run and its limits. The server never reads an order, so that
the memory of a new process never contains the order of another process.

A report is a packet of JSON. A process first reports the levels of its confinement, before it runs the code. After
that, only a process that runs tests and the guardian can report.
"""

import builtins
import contextlib
import json
import operator
import os
import select
import signal
import site
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from types import CoroutineType, ModuleType
from typing import Any, NoReturn

from async_grpo.processes.process_tree import adopt_orphans, die_with, end_descendants, prctl
from async_grpo.rewards.sandbox import unit_test_runner
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS, PR_SET_DUMPABLE, confine
from async_grpo.rewards.sandbox.rpc import RpcChannel, decode, encode
from async_grpo.rewards.sandbox.tested_objects import builtin_exception

# Kinds of sandboxed processes, which are also the names of the modules in which their code runs
PROGRAM = "__main__"
SOLUTION = "solution"
TESTS = "tests"
_FILE_NAME = "solution.py"  # name of the file that a program's code seems to be in, for example in tracebacks
MAX_DESCRIPTORS = 8  # maximum number of descriptors in one request
# Maximum number of threads of a sandboxed process. (RLIMIT_NPROC would count all threads of the user.)
MAX_THREADS = 64
WATCH_S = 0.05  # time between two checks of the number of threads
MAX_MESSAGE_CHARACTERS = 1000  # maximum length of the message of an exception in the tested code
_MUTABLE = (list, dict, set, bytearray)
_PLAIN = (int, float, complex, str, bytes, list, tuple, set, frozenset, dict)


def main(socket_fd: int) -> None:
    """Serve requests until the other end of the socket is closed. Each new process also returns from this function."""
    # Import modules that solutions often use, once for all forked processes
    for name in "bisect copy heapq math random re string".split():
        import_module(name)
    sys.path.remove(os.environ["PYTHONPATH"])
    os.environ.clear()
    sys.argv[:] = [_FILE_NAME]
    # Programs may read and print integers of any length; their processor time is limited anyway
    sys.set_int_max_str_digits(0)
    # Forks inherit this setting, so that sandboxed processes of one user cannot read each other's memory
    prctl(PR_SET_DUMPABLE, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps guardians that have ended
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
    """Be the guardian of a sandboxed process: start it, watch over it, and report its exit code.

    The guardian ends the process if the owner closes the channel or dies, or if the process has too many threads.

    Args:
        channel: Descriptor of the channel for reports.
        descriptors: The descriptor of the order (a file with the code and its limits), followed by those that the
            sandboxed process needs.
    """
    adopt_orphans()  # without the seccomp filter, the process may start other processes
    own_pid = os.getpid()
    pid = os.fork()
    if not pid:
        _be_sandboxed(own_pid, channel, *descriptors)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    # The owner never writes to the channel, so it becomes readable only when the owner closes it
    watched = [os.pidfd_open(pid), channel]
    while not select.select(watched, [], [], WATCH_S)[0]:
        # A host may hide the processes of other users (hidepid)
        with contextlib.suppress(OSError):
            if len(os.listdir(f"/proc/{pid}/task")) > MAX_THREADS:
                break
    exit_code = end_descendants()[pid]
    with contextlib.suppress(OSError):  # the owner is gone
        _report(channel, exit_code=exit_code)
    os._exit(0)  # a regular exit of the interpreter would take 10 ms


def _be_sandboxed(parent_pid: int, channel: int, order_fd: int, *descriptors: int) -> None:
    """Confine this process, and run the code that its order contains. An order is a JSON file (see the module).

    Args:
        parent_pid: Process id of the guardian.
        channel: Descriptor of the channel for reports.
        order_fd: Descriptor of the order.
        descriptors: A program's input and output, or the channel between solution and tests.
    """
    os.setsid()
    with open(order_fd, "rb") as file:
        order: dict[str, Any] = json.loads(file.read())
    os.chdir(order["folder"])
    levels = confine(parent_pid, order["cpu_s"], order["memory_bytes"], order["levels"])
    _report(channel, levels=sorted(levels))
    is_off_network = bool(levels & NETWORK_LEVELS)
    if not is_off_network and not order["allow_unsandboxed"]:
        return
    kind = order["kind"]
    text = order["text"]
    if kind == TESTS:
        _report(channel, verdict=unit_test_runner.run(text, RpcChannel(*descriptors)))
        return
    os.close(channel)
    # A program expects built-in functions such as `exit`, which Python's module `site` defines; here, `site` is not loaded
    # at the start. Tests do not get these functions, which would hide functions of the tested code with the same name
    site.setquit()
    module = ModuleType(kind)
    sys.modules[kind] = module  # data classes look up their module in `sys.modules`
    if kind == SOLUTION:
        _answer(text, module, RpcChannel(*descriptors))
    module.__file__ = _FILE_NAME  # the name that programs expect; no file has it
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    exec(compile(text, _FILE_NAME, "exec"), module.__dict__)


def _report(channel: int, **report: Any) -> None:
    os.write(channel, json.dumps(report).encode())


def _answer(code: str, module: ModuleType, channel: RpcChannel) -> NoReturn:
    """Execute the code as a module, then answer the tests' questions. At the end of the channel, raise a WireError.

    A question is [operation, [arguments], {keywords}]. The operation is a function of `operator` or of Python, or one of
    `_function_of`. If the code raises anything, SystemExit included, every answer is that exception. An answer is one of

        ["value", value, {position or keyword: changed argument}]
        ["argument", position or keyword, {as above}]   the result is this argument, a list or another mutable value
        ["class", number, lineage of an exception class]
        ["coroutine", number]
        ["raised", lineage of the exception's class, message, number of the exception, its arguments]
    """
    # Objects by id. The dict keeps them alive, so that no other object can get the same id.
    objects: dict[int, Any] = {0: module}
    failure: BaseException | None = None

    def refer(value: Any) -> int:
        objects[id(value)] = value
        return id(value)

    def resolve(reference: int | str) -> Any:
        return getattr(builtins, reference) if isinstance(reference, str) else objects[reference]

    def value_of(operation: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        if failure is not None:
            raise failure
        data_before = {str(position): data for position, data in enumerate(args)} | kwargs
        values = {name: decode(data, resolve) for name, data in data_before.items()}
        keywords = {name: values[name] for name in kwargs}
        result = _function_of(operation)(*list(values.values())[: len(args)], **keywords)
        return _answer_of(result, values, data_before, refer)

    try:
        exec(compile(code, "<solution>", "exec"), module.__dict__)
    except BaseException as error:
        failure = error
    while True:
        question = channel.receive()
        try:
            answer = value_of(*question)
        except BaseException as error:  # any exception of the tested code is an answer, too
            message = ""
            arguments = []
            with contextlib.suppress(Exception):  # `__str__` may be tested code, and may raise
                message = str(error)[:MAX_MESSAGE_CHARACTERS]
                if all(len(str(value)) <= MAX_MESSAGE_CHARACTERS for value in error.args):
                    arguments = [encode(value, refer) for value in error.args]
            answer = [
                "raised",
                _lineage(type(error)),
                message,
                refer(error.with_traceback(None)),
                arguments,
            ]
        channel.send(answer)


def _answer_of(
    result: Any, values: dict[str, Any], data_before: dict[str, Any], refer: Callable[[Any], int]
) -> list[Any]:
    """Return the answer to a question whose operation raised nothing, in one of the forms that `_answer` lists.

    Args:
        result: What the operation has returned.
        values: The arguments of the operation, by position or keyword.
        data_before: The arguments as they were sent.
        refer: Stores an object, and returns the number by which later questions refer to it.
    """
    if isinstance(result, type) and issubclass(result, Exception):
        return ["class", refer(result), _lineage(result)]
    if isinstance(result, CoroutineType):
        return ["coroutine", refer(result)]
    mutable_values = {name: value for name, value in values.items() if type(value) in _MUTABLE}
    changed = {}
    for name, value in mutable_values.items():
        data_after = encode(value, refer)
        if data_after != data_before[name]:
            changed[name] = data_after
    for name, value in mutable_values.items():
        if result is value:
            return ["argument", name, changed]
    return ["value", encode(result, refer), changed]


def _lineage(kind: type) -> list[Any]:
    """Return a list of [name, names of the direct bases] for a class and all classes that it is derived from."""
    return [[base.__name__, [parent.__name__ for parent in base.__bases__]] for base in kind.__mro__]


def _function_of(operation: str) -> Any:
    """Return the function that performs an operation."""
    own_functions = {"plain": _plain, "enter": _enter, "exit": _exit, "run": _run}
    if operation in own_functions:
        return own_functions[operation]
    return getattr(operator, operation, None) or getattr(builtins, operation)


def _enter(manager: Any) -> Any:
    """Call the manager's `__enter__`, as a `with` statement does."""
    return type(manager).__enter__(manager)


def _exit(manager: Any, names: list[str], message: str) -> None:
    """Call the manager's `__exit__`, as at the end of a `with` statement.

    Args:
        manager: The context manager.
        names: Names of the class of the exception that ended the block, and of its bases; [] without an exception. The
            manager gets an exception of the first built-in class among them.
        message: Message of the exception.
    """
    error = builtin_exception(names, message, [message]) if names else None
    type(manager).__exit__(manager, error and type(error), error, None)


def _run(coroutine: Any) -> Any:
    """Run a coroutine to its end."""
    return import_module("asyncio").run(coroutine)


def _plain(value: Any) -> Any:
    """Return an object as a value of the plain type from which its class is derived: a named tuple becomes a tuple."""
    kind = next((kind for kind in _PLAIN if isinstance(value, kind)), None)
    if kind is str:
        # `str(member)` of an enumeration would be the member's name
        return str.__str__(value)
    return value if kind is None else kind(value)
