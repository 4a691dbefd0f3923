"""`Channel`: many small calls to one actor in few messages, in both directions, with deadlines and cancellation.

Ray moves some 2,500 small actor calls per second on two cores; a run makes several calls per sample. So a message
carries all calls that were made since the last, and all answers that are ready:

    call("score", x) --- exchange [calls] -->   waits in the actor for the next answers, and `poll_s` at most
    call("score", y) --- exchange [calls] -->   does not wait: it brings the calls that are made meanwhile
    ...              <-- [(id, ANSWER, value), (id, ERROR, error), ...]

Silence means that the actor is stuck or gone; a caller that is silent is forgotten, and its calls are cancelled.
"""

import asyncio
import contextlib
import gc
import inspect
import itertools
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from async_grpo.cluster.ray_session import cause_of
from async_grpo.errors import AsyncGrpoError, RunFailed, WorkerLost

# How long a message waits for company: one costs 3 to 5 ms of CPU on both sides together (`docs/log.md`), a sample has
# seconds, and the last answers of a burst do not wait
ANSWER_DELAY_S, CALL_DELAY_S = 0.1, 0.02
POLL_S = 10.0  # longest silence of a healthy actor
GRACE_S = 30.0  # beyond that: an actor that loads weights or is short of CPU is not lost yet
FORGET_S = 120.0  # a caller that is silent for so long is gone
# What answers a call: one of several values, the only one, their end, an exception
ITEM, ANSWER, END, ERROR = range(4)

Call = tuple[int, str | None, tuple[Any, ...]]  # id, handler (None: cancel the call of this id), arguments
Answer = tuple[int, int, Any]  # id, kind, value


class ChannelServer:
    """The actor's half. Mixed into an actor class, which must be async and call `serve` once."""

    poll_s, forget_s, answer_delay_s = POLL_S, FORGET_S, ANSWER_DELAY_S

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Offer `handlers`: name -> function, coroutine function, or async generator function (for `stream`)."""
        self._handlers = handlers
        self._callers: dict[str, _Caller | None] = {}  # None: forgotten
        gc.freeze()  # or every full collection looks through torch and vLLM again

    async def exchange(self, caller_id: str, calls: list[Call], waits: bool) -> list[Answer]:
        """Take calls; the message that `waits` is answered with what there is, once there is something."""
        now = asyncio.get_running_loop().time()
        if caller_id not in self._callers:
            self._callers[caller_id] = _Caller(now)
        caller = self._callers[caller_id]
        if caller is None:  # its calls were cancelled: it would wait for their answers for ever
            raise WorkerLost(f"a caller that was silent for {self.forget_s:g} s is forgotten with its calls")
        for call_id, method, args in calls:
            if method is not None:
                caller.tasks[call_id] = asyncio.create_task(self._answer(caller, call_id, method, args))
            elif task := caller.tasks.pop(call_id, None):
                task.cancel()
        if not waits:
            return []
        caller.heard_at = now
        for silent_id, silent in self._callers.items():
            if silent is not None and now - silent.heard_at > self.forget_s:
                self._callers[silent_id] = None
                silent.cancel()
        if not caller.answers:
            caller.ready.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(caller.ready.wait(), self.poll_s)
            if caller.tasks:  # others may be about to finish
                caller.idle.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(caller.idle.wait(), self.answer_delay_s)
        answers, caller.answers = caller.answers, []
        return answers

    async def leave(self, caller_id: str) -> None:
        """A caller has closed its channel."""
        if caller := self._callers.pop(caller_id, None):
            caller.cancel()

    def forget_callers(self) -> None:
        """All of them are gone."""
        for caller in filter(None, self._callers.values()):
            caller.cancel()
        self._callers = {}

    async def _answer(self, caller: "_Caller", call_id: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            pending = self._handlers[method](*args)
            if isinstance(pending, AsyncGenerator):
                async with contextlib.aclosing(pending) as items:
                    async for item in items:
                        caller.answer(call_id, ITEM, item)
                caller.answer(call_id, END, None)
            else:
                value = await pending if inspect.isawaitable(pending) else pending
                caller.answer(call_id, ANSWER, value)
        except AsyncGrpoError as error:  # it can be pickled
            caller.answer(call_id, ERROR, error)
        except Exception as error:
            caller.answer(call_id, ERROR, RunFailed(f"{type(error).__name__}: {error}"))
        finally:
            caller.tasks.pop(call_id, None)
            if not caller.tasks:
                caller.idle.set()


@dataclass
class _Caller:
    """What the actor keeps for one caller."""

    heard_at: float
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)  # something is answered
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # all there was is answered

    def answer(self, call_id: int, kind: int, value: Any) -> None:
        self.answers.append((call_id, kind, value))
        self.ready.set()

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()


class Channel:
    """The caller's half, made and used in one event loop. `on_lost` is called once when the actor is lost, even if nothing
    is asked of it; not when the channel is closed."""

    def __init__(self, actor: Any, name: str, on_lost: Callable[[WorkerLost], None] | None = None) -> None:
        self._actor, self.name, self._on_lost = actor, name, on_lost
        self._caller_id = uuid.uuid4().hex
        self._call_ids = itertools.count()
        self._pending: dict[int, asyncio.Queue[tuple[int, Any]]] = {}  # answers of each call
        self._outbox: list[Call] = []
        self._is_waiting = False  # a message waits in the actor
        self.lost: WorkerLost | None = None
        self._poller = asyncio.create_task(self._poll())

    async def call(self, method: str, *args: Any) -> Any:
        """Call a handler of the actor and return its answer, or raise what it raised.

        WorkerLost: the actor died or stopped answering; every call in flight gets it, and every later one.
        """
        async with contextlib.aclosing(self.stream(method, *args)) as answers:
            return await anext(answers)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        """Yield what a handler that is an async generator yields; closing this iterator closes that one."""
        if self.lost:
            raise self.lost
        call_id = next(self._call_ids)
        answers = self._pending[call_id] = asyncio.Queue[tuple[int, Any]]()
        self._send((call_id, method, args))
        try:
            kind = ITEM
            while kind == ITEM:
                kind, value = await answers.get()
                if kind == ERROR:
                    raise value
                if kind != END:
                    yield value
        finally:
            if self._pending.pop(call_id, None):  # the actor has not answered, or not to the end
                self._send((call_id, None, ()))

    def close(self) -> None:
        """Let go of the actor; calls in flight are cancelled there, and fail here."""
        self._on_lost = None
        self._poller.cancel()
        if not self.lost:
            self._actor.leave.remote(self._caller_id)
        self._fail(WorkerLost(f"the channel to {self.name} was closed"))

    def _send(self, call: Call) -> None:
        self._outbox.append(call)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Send the outbox, unless the next message that waits takes it along, which also notices a lost actor."""
        if self._is_waiting and self._outbox and not self.lost:
            self._exchange(waits=False)

    def _exchange(self, waits: bool) -> Any:
        calls, self._outbox = self._outbox, []
        try:
            return self._actor.exchange.remote(self._caller_id, calls, waits)
        except Exception as error:  # an argument that cannot be sent
            self._receive([(call_id, ERROR, error) for call_id, _, _ in calls])
            return self._actor.exchange.remote(self._caller_id, [], waits)

    def _receive(self, answers: list[Answer]) -> None:
        for call_id, kind, value in answers:
            if pending := self._pending.get(call_id):  # else it was cancelled meanwhile
                pending.put_nowait((kind, value))
                if kind != ITEM:
                    del self._pending[call_id]
            elif kind == ITEM:  # Ray may change the order of messages: the cancellation came before the call
                self._send((call_id, None, ()))

    async def _poll(self) -> None:
        silence_s = POLL_S + GRACE_S
        try:
            while True:
                message = self._exchange(waits=True)
                self._is_waiting = True
                async with asyncio.timeout(silence_s):
                    answers = await message
                self._is_waiting = False
                self._receive(answers)
                await asyncio.sleep(CALL_DELAY_S)  # who got an answer may have the next question
        except TimeoutError:
            self._fail(WorkerLost(f"{self.name} did not answer for {silence_s:.0f} s"))
        except RayError as error:
            self._fail(WorkerLost(f"{self.name} died: {cause_of(error)}"))
        except Exception as error:
            self._fail(WorkerLost(f"{self.name} sent an unreadable answer: {error!r}"))

    def _fail(self, error: WorkerLost) -> None:
        self.lost = self.lost or error
        self._receive([(call_id, ERROR, error) for call_id in self._pending])
        if self._on_lost is not None:
            self._on_lost(error)
