"""Reads a judge's reply in a thread, within one budget of processor time for all choices in the reply.

A user's pattern or schema may take long on some replies, so replies are read in threads. These threads are not those of
`asyncio.to_thread`, because slow replies would then delay other work, such as writing checkpoints. A thread cannot be
stopped from outside. Therefore the code in the thread checks its budget and gives up when the budget is spent.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

READ_S = 5.0  # seconds of processor time for all choices in one reply
THREADS = 2  # more threads would compete with the event loop for Python's global lock

_Result = TypeVar("_Result")


class ReadingBudget:
    """The processor time that the calling thread may still spend on one reply."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + READ_S

    def left_s(self) -> float:
        """Return the seconds of processor time that are left.

        Raises:
            TimeoutError: The budget is spent.
        """
        seconds_left = self._end_s - time.thread_time()
        if seconds_left <= 0:
            raise TimeoutError(f"reading the judge's reply takes more than {READ_S:g} s")
        return seconds_left


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="judge-replies")


async def beside_the_loop(function: Callable[[], _Result]) -> _Result:
    """Run a function in a thread, without blocking the event loop, and return its result."""
    # Imported here, because registry files import this module and must load fast
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(_threads(), function)
