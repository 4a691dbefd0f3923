"""One sandboxed process: it confines itself, reports that, and runs the text it was given.

The order (JSON, in a file without a name) holds the text. The report is one line of JSON, written before any text is
looked at; after it only an examiner writes there, its verdict.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

from async_grpo.rewards.sandbox import solution_process as witness
from async_grpo.rewards.sandbox import unit_test_runner as examiner
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS, confine
from async_grpo.rewards.sandbox.rpc import Channel

PROGRAM, WITNESS, EXAMINER = "program", "witness", "examiner"


def main(kind: str, folder: str, descriptors: list[int], parent_pid: int) -> None:
    """Do as ordered; the process ends when this returns or raises.

    Args:
        descriptors: of order and report, and for a program its input and output, else the channel to the other.
    """
    os.setsid()
    os.chdir(folder)
    order_fd, report_fd, *others = descriptors
    with open(order_fd, "rb") as file:
        order: dict[str, Any] = json.loads(file.read())
    levels = confine(parent_pid, order["cpu_s"], order["memory_bytes"], order["levels"])
    os.write(report_fd, json.dumps(sorted(levels)).encode() + b"\n")
    if not (levels & NETWORK_LEVELS or order["allow_unsandboxed"]):
        return
    if kind == EXAMINER:
        os.write(report_fd, examiner.run(order["text"], Channel(*others)).encode())
        return
    os.close(report_fd)
    if kind == WITNESS:
        witness.run(order["text"], Channel(*others))
    else:
        _run_program(order["text"], *others)


def _run_program(text: str, stdin: int, stdout: int) -> None:
    for target, descriptor in enumerate((stdin, stdout)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(text, "solution.py", "exec"), module.__dict__)
