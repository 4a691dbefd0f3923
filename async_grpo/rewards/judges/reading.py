"""Reading a judge's reply beside the event loop, within one budget of processor time for all choices of the reply.

A pattern or a schema of the user may take long on a text that the judge chose, so replies are read in threads. They are not
the threads of `asyncio.to_thread`, which also write checkpoints. Nothing can end a thread from outside, so the work itself
checks its budget and gives up when it is spent.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

READ_S = 5.0  # of processor time, for all choices of one reply
THREADS = 2  # more would compete with the event loop for Python's lock

_Result = TypeVar("_Result")


class ReadingBudget:
    """The processor time that the calling thread may still spend on one reply."""

    def __init__(self) -> None:
        self._end_s = time.thread_time() + READ_S

    def left_s(self) -> float:
        """Return the seconds that are left.

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
    """Run a function in a thread while the event loop continues, and return what it returns."""
    # Registry files import this module and must load fast
    import asyncio

    return await asyncio.get_running_loop().run_in_executor(_threads(), function)
