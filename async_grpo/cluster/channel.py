"""`Channel`: sends many small calls to one actor in few messages, with deadlines and cancellation.

Ray handles some 2,500 small actor calls per second on two cores, and a run makes several calls per sample. So a message
carries all calls that were made since the last message, and its reply carries all answers that are ready:

    call("score", x) --- exchange [calls] -->   waits in the actor for the next answers, at most `poll_s`
    call("score", y) --- exchange [calls] -->   returns at once: brings the calls made while the first message waits
    ...              <-- [(id, ANSWER, value), (id, ERROR, error), ...]

If the actor is silent, the caller treats it as lost. If a caller is silent, the actor forgets it and cancels its calls.
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

# Seconds that an answer or a call waits for others, so that all of them are sent in one message. A message costs 3 to 5
# ms of CPU in total on both sides (`docs/log.md`). The wait is short compared to a sample, which takes seconds. If no
# call of the caller is open any more, answers are sent without waiting
ANSWER_DELAY_S = 0.1
CALL_DELAY_S = 0.02
# Seconds after which an actor that has no answers sends an empty reply, to show that it is alive
POLL_S = 10.0
GRACE_S = 30.0  # seconds of silence allowed in addition, for an actor that loads weights or is short of CPU
FORGET_S = 120.0  # seconds of silence after which a caller is forgotten
# Kinds of answers
ITEM = 0  # one value of a stream
ANSWER = 1  # the only value of a call
END = 2  # the end of a stream of values
ERROR = 3  # an exception

# (id, handler, arguments); handler None cancels the call of this id
Call = tuple[int, str | None, tuple[Any, ...]]
Answer = tuple[int, int, Any]  # (id, kind of answer, value)


class ChannelServer:
    """The actor's side of a channel: a mixin for an async actor class, which must call `serve` once."""

    poll_s = POLL_S
    forget_s = FORGET_S
    answer_delay_s = ANSWER_DELAY_S

    def serve(self, handlers: Mapping[str, Callable[..., Any]]) -> None:
        """Make handlers available to callers.

        Args:
            handlers: Functions, coroutine functions, and async generator functions (for `Channel.stream`), by name.
        """
        self._handlers = handlers
        # Callers by id; None marks a caller that was silent and is forgotten
        self._callers: dict[str, _Caller | None] = {}
        # Exclude the objects of torch and vLLM from garbage collection, so that each collection is short
        gc.freeze()

    async def exchange(self, caller_id: str, calls: list[Call], waits: bool) -> list[Answer]:
        """Begin new calls, and return the ready answers to earlier calls.

        Args:
            caller_id: Id of the caller's channel.
            calls: New calls, and cancellations of earlier calls.
            waits: Whether to wait for answers, at most `poll_s`. If False, return at once without answers.

        Returns:
            The answers that are ready, or [] if `waits` is False.

        Raises:
            WorkerLost: The caller was silent too long and has been forgotten.
        """
        now = asyncio.get_running_loop().time()
        if caller_id not in self._callers:
            self._callers[caller_id] = _Caller(now)
        caller = self._callers[caller_id]
        if caller is None:
            # All calls of a forgotten caller were cancelled. Without this error, the caller would wait for their
            # answers forever
            raise WorkerLost(f"a caller that was silent for {self.forget_s:g} s is forgotten with its calls")
        self._begin_calls(caller, calls)
        if not waits:
            return []
        caller.heard_at = now
        self._forget_silent_callers(now)
        await self._wait_for_answers(caller)
        answers = caller.answers
        caller.answers = []
        return answers

    def _begin_calls(self, caller: "_Caller", calls: list[Call]) -> None:
        """Begin the new calls, and cancel the calls whose cancellation is requested."""
        for call_id, method, args in calls:
            if method is not None:
                caller.tasks[call_id] = asyncio.create_task(self._answer(caller, call_id, method, args))
                continue
            task = caller.tasks.pop(call_id, None)
            if task is not None:
                task.cancel()

    def _forget_silent_callers(self, now: float) -> None:
        for caller_id, caller in self._callers.items():
            if caller is not None and now - caller.heard_at > self.forget_s:
                self._callers[caller_id] = None
                caller.cancel()

    async def _wait_for_answers(self, caller: "_Caller") -> None:
        """Wait at most `poll_s` for an answer, then at most `answer_delay_s` for the caller's other answers."""
        if caller.answers:
            return
        caller.has_answers.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(caller.has_answers.wait(), self.poll_s)
        if caller.tasks:
            caller.is_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(caller.is_idle.wait(), self.answer_delay_s)

    async def leave(self, caller_id: str) -> None:
        """Cancel the calls of a caller that has closed its channel."""
        caller = self._callers.pop(caller_id, None)
        if caller is not None:
            caller.cancel()

    def forget_callers(self) -> None:
        """Cancel the calls of all callers, and forget the callers."""
        for caller in self._callers.values():
            if caller is not None:
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
        except AsyncGrpoError as error:
            caller.answer(call_id, ERROR, error)
        except Exception as error:
            # Send only the text of the error: other classes of exceptions may not be picklable
            caller.answer(call_id, ERROR, RunFailed(f"{type(error).__name__}: {error}"))
        finally:
            caller.tasks.pop(call_id, None)
            if not caller.tasks:
                caller.is_idle.set()


@dataclass
class _Caller:
    """The state that the actor keeps for one caller."""

    # Event loop time at which the caller's last `exchange` with `waits=True` began
    heard_at: float
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)  # unfinished calls, by id
    answers: list[Answer] = field(default_factory=list)  # answers that are not sent yet
    has_answers: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)  # set when all calls are finished

    def answer(self, call_id: int, kind: int, value: Any) -> None:
        """Store an answer for the next reply."""
        self.answers.append((call_id, kind, value))
        self.has_answers.set()

    def cancel(self) -> None:
        """Cancel all unfinished calls."""
        for task in self.tasks.values():
            task.cancel()


class Channel:
    """The caller's side of a channel. Create and use it in one event loop.

    Args:
        actor: Handle of an actor that is a `ChannelServer`.
        name: Name of the actor in error messages.
        on_lost: Called when the actor is lost, even if no call is in flight. It is not called when the channel is
            closed.
    """

    def __init__(self, actor: Any, name: str, on_lost: Callable[[WorkerLost], None] | None = None) -> None:
        self._actor = actor
        self.name = name
        self._on_lost = on_lost
        self._caller_id = uuid.uuid4().hex
        self._call_ids = itertools.count()
        # answers of each unfinished call, by id
        self._pending: dict[int, asyncio.Queue[tuple[int, Any]]] = {}
        self._outbox: list[Call] = []  # calls that are not sent yet
        self._is_waiting = False  # whether the actor keeps the poller's message open until it has answers
        self.lost: WorkerLost | None = None
        self._poller = asyncio.create_task(self._poll())

    async def call(self, method: str, *args: Any) -> Any:
        """Call a handler of the actor and return its answer. Exceptions of the handler are raised here.

        Raises:
            WorkerLost: The actor died or stopped answering. All calls in flight and all later calls raise this error.
        """
        async with contextlib.aclosing(self.stream(method, *args)) as answers:
            return await anext(answers)

    async def stream(self, method: str, *args: Any) -> AsyncGenerator[Any]:
        """Yield the items of a handler that is an async generator.

        Closing this generator also closes the one in the actor.
        """
        if self.lost:
            raise self.lost
        call_id = next(self._call_ids)
        answers = asyncio.Queue[tuple[int, Any]]()
        self._pending[call_id] = answers
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
            is_unfinished = self._pending.pop(call_id, None) is not None
            if is_unfinished:
                self._send((call_id, None, ()))

    def close(self) -> None:
        """Close the channel. Calls in flight are cancelled in the actor, and raise WorkerLost here."""
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
        """Send the outbox in a message of its own, if the poller's message is waiting in the actor for answers.

        If there is no such message, do nothing: the poller sends its next message soon, with the outbox.
        """
        if self._is_waiting and self._outbox and not self.lost:
            self._exchange(waits=False)

    def _exchange(self, waits: bool) -> Any:
        calls = self._outbox
        self._outbox = []
        try:
            return self._actor.exchange.remote(self._caller_id, calls, waits)
        except Exception as error:
            # An argument cannot be pickled. Ray does not tell which call it belongs to, so report the error to all
            # calls
            self._receive([(call_id, ERROR, error) for call_id, _, _ in calls])
            return self._actor.exchange.remote(self._caller_id, [], waits)

    def _receive(self, answers: list[Answer]) -> None:
        for call_id, kind, value in answers:
            # A call that was cancelled in the meantime is no longer pending. Drop its answer
            pending = self._pending.get(call_id)
            if pending is not None:
                pending.put_nowait((kind, value))
                if kind != ITEM:
                    del self._pending[call_id]
            elif kind == ITEM:
                # An item arrived for a cancelled call. Ray may reorder messages, so the cancellation may have arrived
                # before the call itself. Send it again
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
                # Give callers that just got an answer time to make their next calls, so that these share one message
                await asyncio.sleep(CALL_DELAY_S)
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
