"""`Channel`: many small calls to one actor in few messages, in both directions, with deadlines and cancellation.

Ray moves some 2,500 small actor calls per second on two cores; a run makes several calls per sample. So all answers
that are ready come back together (`poll`), and what they make their callers ask next leaves with the poll that follows;
only calls made while a poll is waiting need a message more (`submit`). The busier the actor, the more each one carries.

    caller                                  actor
    call("score", x) --- poll [calls] -->   runs handlers, a task each
    call("score", y) --- submit [calls] ->
    ...              <-- [(id, ANSWER, value), (id, ERROR, error), ...]   as soon as there is one, and those soon after

A handler that is an async generator answers item by item (`stream`): the items that are ready travel together, too.

An answer to `poll` comes at least every `POLL_S` seconds, so silence means that the actor is stuck or gone.
"""

import asyncio
import contextlib
import itertools
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from async_grpo.errors import RunFailed, WorkerLost

POLL_S = 10.0  # longest silence of a healthy actor
# How long a message waits for company: messages are most of what is left of the cost, and a sample has seconds
ANSWER_DELAY_S, CALL_DELAY_S = 0.02, 0.01
GRACE_S = 30.0  # beyond that: an actor that loads weights or is short of CPU is not lost yet
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ITEM, ANSWER, ERROR = range(
    3
)  # what an entry of a reply is: one of several, the last or only one, an exception
FORGET_S = 120.0  # a caller that does not poll for so long is gone: its calls are cancelled


class ChannelServer:
    """The actor's half. Mixed into an actor class, which must be async and call `serve` once."""

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Offer `handlers`: name -> coroutine function (for `call`) or async generator function (for `stream`)."""
        self._handlers = handlers
        self._callers: dict[str, _Caller] = {}
        self._forgotten: set[str] = set()

    async def submit(self, caller_id: str, calls: list[tuple[int, str, tuple]], cancelled: list[int]) -> None:
        caller = self._caller(caller_id)
        self._begin(caller, calls, cancelled)

    async def poll(
        self, caller_id: str, calls: list[tuple[int, str, tuple]], cancelled: list[int]
    ) -> list[tuple[int, int, Any]]:
        caller = self._caller(caller_id)
        self._begin(caller, calls, cancelled)
        caller.last_poll = asyncio.get_running_loop().time()
        self._forget_silent_callers()
        if not caller.answers:
            caller.ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(caller.ready.wait(), POLL_S)
            if caller.tasks:  # others may be about to finish
                await asyncio.sleep(ANSWER_DELAY_S)
        answers, caller.answers = caller.answers, []
        return answers

    def _begin(self, caller: "_Caller", calls: list[tuple[int, str, tuple]], cancelled: list[int]) -> None:
        for call_id in cancelled:
            if task := caller.tasks.pop(call_id, None):
                task.cancel()
        for call_id, method, args in calls:
            caller.tasks[call_id] = asyncio.create_task(self._answer(caller, call_id, method, args))

    async def _answer(self, caller: "_Caller", call_id: int, method: str, args: tuple) -> None:
        try:
            pending = self._handlers[method](*args)
            if isinstance(pending, AsyncGenerator):
                async with contextlib.aclosing(pending) as items:
                    async for item in items:
                        caller.answer(call_id, ITEM, item)
                caller.answer(call_id, ANSWER, None)
            else:
                caller.answer(call_id, ANSWER, await pending)
        except Exception as error:
            caller.answer(call_id, ERROR, _portable(error))
        finally:
            caller.tasks.pop(call_id, None)

    def _caller(self, caller_id: str) -> "_Caller":
        if caller_id in self._forgotten:  # its calls were cancelled: it would wait for their answers for ever
            raise WorkerLost(f"a caller that was silent for {FORGET_S:g} s is forgotten, with all its calls")
        if caller_id not in self._callers:
            self._callers[caller_id] = _Caller(asyncio.get_running_loop().time())
        return self._callers[caller_id]

    def _forget_silent_callers(self) -> None:
        now = asyncio.get_running_loop().time()
        for caller_id, caller in list(self._callers.items()):
            if now - caller.last_poll > FORGET_S:
                del self._callers[caller_id]
                self._forgotten.add(caller_id)
                for task in caller.tasks.values():
                    task.cancel()


class _Caller:
    """What the actor keeps for one caller."""

    def __init__(self, now: float) -> None:
        self.tasks: dict[int, asyncio.Task] = {}
        self.answers: list[tuple[int, int, Any]] = []
        self.ready = asyncio.Event()
        self.last_poll = now

    def answer(self, call_id: int, kind: int, value: Any) -> None:
        self.answers.append((call_id, kind, value))
        self.ready.set()


class Channel:
    """The caller's half, bound to one event loop.

    Args:
        on_lost: called once when the actor is lost, even if nothing is asked of it; not when the channel is closed.

    Raises (from `call`):
        WorkerLost: the actor died or stopped answering; every call in flight gets it, and every later one.
    """

    def __init__(self, actor: Any, name: str, on_lost: Callable[[WorkerLost], None] | None = None) -> None:
        self._actor, self.name, self._on_lost = actor, name, on_lost
        self._caller_id = uuid.uuid4().hex
        self._call_ids = itertools.count()
        self._pending: dict[int, asyncio.Future] = {}
        self._items: dict[int, asyncio.Queue[Any]] = {}  # of calls that answer item by item
        self._outbox: list[tuple[int, str, tuple]] = []
        self._cancelled: list[int] = []
        self._flush_scheduled = False
        self._is_polling = False  # a poll waits in the actor
        self._poller: asyncio.Task | None = None
        self.lost: WorkerLost | None = None
        if on_lost is not None:
            self._poller = asyncio.create_task(self._poll())

    async def call(self, method: str, *args: Any) -> Any:
        """Call a handler of the actor and return its answer, or raise what it raised."""
        call_id, future = self._send(method, args)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(call_id)
            raise

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        """Yield what a handler that is an async generator yields; closing this iterator closes that one."""
        call_id, future = self._send(method, args)
        items: asyncio.Queue[Any] = asyncio.Queue()
        self._items[call_id] = items
        future.add_done_callback(lambda _: items.put_nowait(future))
        try:
            while (item := await items.get()) is not future:
                yield item
            future.result()
        finally:
            del self._items[call_id]
            self._cancel(call_id)

    def _send(self, method: str, args: tuple) -> tuple[int, asyncio.Future]:
        if self.lost:
            raise self.lost
        call_id = next(self._call_ids)
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        self._outbox.append((call_id, method, args))
        self._schedule_flush()
        return call_id, future

    def _cancel(self, call_id: int) -> None:
        """The caller has gone; the actor is told, unless it has answered."""
        if future := self._pending.pop(call_id, None):
            future.cancel()
            self._cancelled.append(call_id)
            self._schedule_flush()

    def close(self) -> None:
        """Stop polling; calls in flight fail."""
        self._on_lost = None
        if self._poller:
            self._poller.cancel()
        self._fail(WorkerLost(f"the channel to {self.name} was closed"))

    def _schedule_flush(self) -> None:
        """See that the outbox leaves: with the next poll, unless one is waiting for answers already."""
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())
        elif self._is_polling and not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._is_polling and not self.lost:  # else the next poll takes it along
            self._send_outbox(self._actor.submit)  # a lost actor is noticed by the poll

    def _send_outbox(self, method: Any) -> Any:
        cancelled, self._cancelled = self._cancelled, []
        calls = [call for call in self._outbox if self._is_wanted(call[0])]
        self._outbox = []
        try:
            return method.remote(self._caller_id, calls, cancelled)
        except Exception as error:  # an argument that cannot be sent
            for call_id, _, _ in calls:
                self._resolve(call_id, ERROR, _portable(error))
            return method.remote(self._caller_id, [], cancelled)

    def _is_wanted(self, call_id: int) -> bool:
        """Whether the call has not been cancelled: its future is, before its caller has been told."""
        future = self._pending.get(call_id)
        return future is not None and not future.done()

    async def _poll(self) -> None:
        try:
            while True:
                poll = self._send_outbox(self._actor.poll)
                self._is_polling = True
                answers = await asyncio.wait_for(_result(poll), POLL_S + GRACE_S)
                self._is_polling = False
                for entry in answers:
                    self._resolve(*entry)
                await asyncio.sleep(CALL_DELAY_S)  # who got an answer may have the next question
        except (RayError, TimeoutError) as error:
            silent = f"did not answer for {POLL_S + GRACE_S:.0f} s"
            self._fail(
                WorkerLost(f"{self.name} {silent if isinstance(error, TimeoutError) else _first_line(error)}")
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(WorkerLost(f"{self.name} sent an unreadable answer: {error!r}"))

    def _resolve(self, call_id: int, kind: int, value: Any) -> None:
        if kind == ITEM:
            if items := self._items.get(call_id):
                items.put_nowait(value)
            return
        future = self._pending.pop(call_id, None)
        if future is None or future.done():
            return  # the call was cancelled meanwhile
        future.set_result(value) if kind == ANSWER else future.set_exception(value)

    def _fail(self, error: WorkerLost) -> None:
        self.lost = self.lost or error
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)
        if self._on_lost is not None:
            self._on_lost(error)


async def _result(reference: Any) -> Any:
    return await reference


def _first_line(error: RayError) -> str:
    """Ray's errors are pages long; the cause is in the first lines."""
    text = " ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
    return f"died: {COLOURS.sub('', text)[:300]}"


def _portable(error: Exception) -> Exception:
    """`error` itself if it survives pickling, else its text."""
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
        return error
    except Exception as not_portable:
        return RunFailed(f"{type(error).__name__}: {error} ({type(not_portable).__name__} when pickled)")
