"""One sandboxed process: it confines itself, reports that, and runs the text it was given.

The order (JSON, in a file without a name) holds the text. A report is a line of JSON. The first is written before any
text is looked at; after it only a process that runs tests can report, its verdict.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

from async_grpo.rewards.sandbox import solution_process, unit_test_runner
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS, confine
from async_grpo.rewards.sandbox.rpc import Channel

PROGRAM, SOLUTION, TESTS = "program", "solution", "tests"


def main(parent_pid: int, channel: int, order_fd: int, *descriptors: int) -> None:
    """Do as ordered; the process ends when this returns or raises.

    Args:
        channel: for reports.
        descriptors: for a program its input and output, else the channel between solution and tests.
    """
    os.setsid()
    with open(order_fd, "rb") as file:
        order: dict[str, Any] = json.loads(file.read())
    os.chdir(order["folder"])
    levels = confine(parent_pid, order["cpu_s"], order["memory_bytes"], order["levels"])
    _report(channel, levels=sorted(levels))
    if not (levels & NETWORK_LEVELS or order["allow_unsandboxed"]):
        return
    if order["kind"] == TESTS:
        _report(channel, verdict=unit_test_runner.run(order["text"], Channel(*descriptors)))
        return
    os.close(channel)
    if order["kind"] == SOLUTION:
        solution_process.run(order["text"], Channel(*descriptors))
    else:
        _run_program(order["text"], *descriptors)


def _report(channel: int, **report: Any) -> None:
    os.write(channel, json.dumps(report).encode() + b"\n")


def _run_program(text: str, stdin: int, stdout: int) -> None:
    for target, descriptor in enumerate((stdin, stdout)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(text, "solution.py", "exec"), module.__dict__)
