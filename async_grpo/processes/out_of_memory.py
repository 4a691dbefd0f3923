"""Turn errors for lack of memory into `OutOfMemory`, which names the activity, memory planned and used, and a way out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.errors import AsyncGrpoError, OutOfMemory
from async_grpo.processes.memory_use import memory_in_words

# Parts of the messages, in lower case, with which libraries and the operating system report a lack of memory
SIGNS = (
    "out of memory",  # written by CUDA, torch and vLLM
    "can't allocate memory",  # written by torch's allocator of main memory
    "cannot allocate memory",  # written by the operating system (ENOMEM)
    "not enough memory: you tried to allocate",  # written by torch's allocator of main memory
    "bad_alloc",  # written by the C++ library
    "cublas_status_alloc_failed",
    "no available memory for the cache blocks",  # vLLM: the KV cache has no room
    "larger than the available kv cache memory",  # vLLM: the KV cache has no room for one sequence
    "is less than desired gpu memory utilization",  # vLLM: another program has taken the engine's share
    "is less than desired cpu memory utilization",
    "is less than requested memory for kv",  # vLLM: the KV cache does not fit into the main memory
)
# Names of exceptions that always mean a lack of memory; Ray's object store raises the last one
TYPE_NAMES = ("OutOfMemoryError", "MemoryError", "OutOfMemory", "ObjectStoreFullError")
MAX_REASON_CHARACTERS = 400
# Number of bytes at the end of the log in which an error of a child process is searched
LOG_BYTES = 1 << 18


@contextmanager
def naming_out_of_memory(activity: str, cure: str, *, searches_log: bool = False) -> Iterator[None]:
    """Raise `OutOfMemory` in place of any error of the block that reports a lack of memory.

    Args:
        activity: What the block does, such as "in the backward pass of 4,096 tokens".
        cure: Which options to change, as an imperative.
        searches_log: Whether an error may come from a child process, which has written its cause to this process's log.

    Raises:
        OutOfMemory: The memory is exhausted. All other errors are raised as they are.
    """
    try:
        yield
    except AsyncGrpoError:
        raise
    except Exception as error:
        reason = reason_of(error)
        if not reason and searches_log:
            reason = reason_in_log()
        if not reason:
            raise
        raise OutOfMemory(message(activity, cure, reason)) from error


def message(activity: str, cure: str, reason: str) -> str:
    """Return the message of an `OutOfMemory` error: activity, cure, memory planned and in use, and the original error."""
    details = "; ".join(text for text in (memory_in_words(), reason) if text)
    return f"out of memory {activity}: {cure} ({details})"


def reason_of(error: BaseException) -> str:
    """Return a message about a lack of memory, on one line, if that caused the error; "" if the cause is another one."""
    cause: BaseException | None = error
    visited: set[int] = set()
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        text = " ".join(str(cause).split())
        if type(cause).__name__ in TYPE_NAMES or has_sign(text):
            return f"{type(cause).__name__}: {text}"[:MAX_REASON_CHARACTERS]
        # After `raise ... from None`, the error that was being handled does not count as the cause
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
    return ""


def has_sign(text: str) -> bool:
    """Return whether a text reports a lack of memory.

    >>> has_sign("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    True
    >>> has_sign("the weights were not accepted")
    False
    """
    lower_case = text.lower()
    return any(sign in lower_case for sign in SIGNS)


def reason_in_log() -> str:
    """Return the last line of this process's log that reports an error for lack of memory; "" if there is none.

    If an engine's process fails, the worker that started it learns only that it ended. But the process wrote the error
    to the worker's log.
    """
    try:
        path = Path(os.readlink("/proc/self/fd/2"))
        if not path.is_file():
            return ""
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = log.read(LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        # Only lines that name an error count, because vLLM's warnings also speak of memory
        if "Error" in line and has_sign(line):
            return " ".join(line.split())[-MAX_REASON_CHARACTERS:]
    return ""
