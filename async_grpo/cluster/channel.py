"""`Channel`: many small calls to one actor in few messages, in both directions, with deadlines and cancellation.

Ray moves some 2,500 small actor calls per second on two cores; a run makes several calls per sample. So all calls made
in one turn of the event loop leave together (`submit`), and all answers that are ready come back together (`poll`):
the busier the actor, the more each message carries. A call costs no message of its own.

    caller                                actor
    call("complete", x) --- submit -->    runs handler, a task each
    ...                 <-- poll ------   [(id, True, value), (id, False, error), ...]   as soon as there is one

An answer to `poll` comes at least every `POLL_S` seconds, so silence means that the actor is stuck or gone.
"""

import asyncio
import contextlib
import itertools
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from async_grpo.errors import RunFailed, WorkerLost

POLL_S = 10.0  # longest silence of a healthy actor
BATCHING_DELAY_S = 0.003
GRACE_S = 30.0  # beyond that: an actor that loads weights or is short of CPU is not lost yet
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FORGET_S = 120.0  # a caller that does not poll for so long is gone: its calls are cancelled


class ChannelServer:
    """The actor's half. Mixed into an actor class, which must be async and call `serve` once."""

    def serve(self, handlers: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
        """Offer `handlers`: name -> coroutine function."""
        self._handlers = handlers
        self._callers: dict[str, _Caller] = {}
        self._forgotten: set[str] = set()

    async def submit(self, caller_id: str, calls: list[tuple[int, str, tuple]], cancelled: list[int]) -> None:
        caller = self._caller(caller_id)
        for call_id in cancelled:
            if task := caller.tasks.pop(call_id, None):
                task.cancel()
        for call_id, method, args in calls:
            task = asyncio.create_task(self._answer(caller, call_id, method, args))
            caller.tasks[call_id] = task

    async def poll(self, caller_id: str) -> list[tuple[int, bool, Any]]:
        caller = self._caller(caller_id)
        caller.last_poll = asyncio.get_running_loop().time()
        self._forget_silent_callers()
        if not caller.answers:
            caller.ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(caller.ready.wait(), POLL_S)
            if caller.tasks:  # others may be about to finish: a message costs more than this wait
                await asyncio.sleep(BATCHING_DELAY_S)
        answers, caller.answers = caller.answers, []
        return answers

    async def _answer(self, caller: "_Caller", call_id: int, method: str, args: tuple) -> None:
        try:
            answer = (call_id, True, await self._handlers[method](*args))
        except asyncio.CancelledError:
            caller.tasks.pop(call_id, None)
            raise
        except Exception as error:
            answer = (call_id, False, _portable(error))
        caller.tasks.pop(call_id, None)
        caller.answers.append(answer)
        caller.ready.set()

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
        self.answers: list[tuple[int, bool, Any]] = []
        self.ready = asyncio.Event()
        self.last_poll = now


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
        self._outbox: list[tuple[int, str, tuple]] = []
        self._cancelled: list[int] = []
        self._flush_scheduled = False
        self._poller: asyncio.Task | None = None
        self.lost: WorkerLost | None = None
        if on_lost is not None:
            self._poller = asyncio.create_task(self._poll())

    async def call(self, method: str, *args: Any) -> Any:
        """Call a handler of the actor and return its answer, or raise what it raised."""
        if self.lost:
            raise self.lost
        call_id = next(self._call_ids)
        future = self._pending[call_id] = asyncio.get_running_loop().create_future()
        self._outbox.append((call_id, method, args))
        self._schedule_flush()
        try:
            return await future
        except asyncio.CancelledError:
            if self._pending.pop(call_id, None) is not None:
                self._cancelled.append(call_id)
                self._schedule_flush()
            raise

    def close(self) -> None:
        """Stop polling; calls in flight fail."""
        self._on_lost = None
        if self._poller:
            self._poller.cancel()
        self._fail(WorkerLost(f"the channel to {self.name} was closed"))

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.lost:
            return
        cancelled, self._cancelled = self._cancelled, []
        calls = [call for call in self._outbox if self._is_wanted(call[0])]
        self._outbox = []
        try:
            self._actor.submit.remote(
                self._caller_id, calls, cancelled
            )  # a lost actor is noticed by the poll
        except Exception as error:  # an argument that cannot be sent
            for call_id, _, _ in calls:
                self._resolve(call_id, False, _portable(error))
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll())

    def _is_wanted(self, call_id: int) -> bool:
        """Whether the call has not been cancelled: its future is, before its caller has been told."""
        future = self._pending.get(call_id)
        return future is not None and not future.done()

    async def _poll(self) -> None:
        try:
            while True:
                poll = self._actor.poll.remote(self._caller_id)
                for call_id, ok, value in await asyncio.wait_for(_result(poll), POLL_S + GRACE_S):
                    self._resolve(call_id, ok, value)
        except (RayError, TimeoutError) as error:
            silent = f"did not answer for {POLL_S + GRACE_S:.0f} s"
            self._fail(
                WorkerLost(f"{self.name} {silent if isinstance(error, TimeoutError) else _first_line(error)}")
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(WorkerLost(f"{self.name} sent an unreadable answer: {error!r}"))

    def _resolve(self, call_id: int, ok: bool, value: Any) -> None:
        future = self._pending.pop(call_id, None)
        if future is None or future.done():
            return  # the call was cancelled meanwhile
        future.set_result(value) if ok else future.set_exception(value)

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
