"""An event loop whose clock jumps to the next timer: hours pass in milliseconds, and a deadlock is found at once."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

from async_grpo.processes.waits import situation

T = TypeVar("T")
MOST_PASSES = 100_000  # of the loop within one instant


class Stuck(AssertionError):
    """Nothing is left to run, or everything runs and no time passes."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`thread_s`: how long a function is in its thread. It runs when it is handed over: two such are never at once, but
    their answers may come in another order."""

    def __init__(self, thread_s: Callable[[], float]) -> None:
        self._now, self._passes, self._thread_s = 1000.0, 0, thread_s
        super().__init__()
        self._clock_resolution = 1e-9
        self._selector.select = self._jump

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None) -> list[Any]:
        self._passes = 0 if timeout else self._passes + 1
        if timeout is None or self._passes > MOST_PASSES:
            waits = "; ".join(f"{wait.who} for {wait.whom}" for wait in situation()["waits"])
            raise Stuck(
                f"{'nothing is left to run' if timeout is None else 'no time passes'}; waiting: {waits}"
            )
        self._now += timeout
        return []

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        answered = self.create_future()
        try:
            answer, value = answered.set_result, func(*args)
        except Exception as error:
            answer, value = answered.set_exception, error
        self.call_later(self._thread_s(), lambda: answered.done() or answer(value))
        return answered


def run(main: Coroutine[Any, Any, T], limit_s: float | None, seed: int = 0) -> T:
    """Run it in virtual time, which `time` tells as well. Stuck: see there. TimeoutError: it takes longer."""
    draw = random.Random(seed)
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(lambda: draw.random())) as runner:
        now = runner.get_loop().time
        with mock.patch.multiple(time, monotonic=now, time=now):
            return runner.run(asyncio.wait_for(main, limit_s))
