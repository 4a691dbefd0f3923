"""`offloaded`: runs work on large texts in a thread, so that one request or reply does not delay all others.

A thread does not help with very large texts. C code that holds Python's global lock, such as the parsing of JSON or a
regular expression, stops all threads. Callers must therefore limit the size of texts first.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

LARGE_CHARACTERS = 32_768  # for longer texts, the work takes longer than the switch to a thread (0.1 ms)
THREADS = 2  # more threads would compete with the event loop for Python's global lock

_Result = TypeVar("_Result")
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="large-texts")


async def offloaded(size: int, function: Callable[..., _Result], *arguments: Any, **options: Any) -> _Result:
    """Call a function, in a thread if its text is large, and return its result.

    Small work runs directly in the event loop, without giving control to other tasks. If the caller is cancelled, it
    does not wait for the thread. The thread finishes its work, and the result is dropped.

    Args:
        size: Characters or bytes of the text that the function works on.
        function: The function.
        arguments: Positional arguments of the function.
        options: Keyword arguments of the function.
    """
    if size < LARGE_CHARACTERS:
        return function(*arguments, **options)
    work = partial(function, *arguments, **options)
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
