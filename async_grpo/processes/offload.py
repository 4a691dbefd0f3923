"""`offloaded`: work on large texts leaves the event loop, so that one request or reply does not hold up all others.

A thread alone is not enough: a single call into C code that keeps Python's lock (parsing JSON, a regular expression)
stops every thread. Callers therefore bound the sizes first, and use this for work that is bounded but long.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

LARGE_CHARACTERS = 32_768  # from this size on, a thread's start (some 0.1 ms) costs less than the work does
THREADS = 2  # more would compete with the event loop for Python's lock

_Result = TypeVar("_Result")
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="large-texts")


async def offloaded(size: int, function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Return what the function returns; it runs in a thread if `size` (characters or bytes) is large.

    A small one runs at once: nothing else happens in the event loop before it has returned. A caller that is cancelled
    goes on at once; the thread finishes its work, and nobody hears of the result.
    """
    if size < LARGE_CHARACTERS:
        return function(*arguments, **options)
    work = partial(function, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
