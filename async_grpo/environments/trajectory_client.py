"""`TrajectoryClient`: the object through which a rollout program asks the policy.

Every turn is a request of its own to whichever engine has room. Between turns a trajectory occupies no engine.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_grpo.environments.chat import Message, TrajectoryOver, too_long
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.control_tokens import Rendered
from async_grpo.environments.sequence import EngineInput
from async_grpo.environments.trajectory import CHARACTERS_PER_TOKEN, TrajectoryRecorder
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.options.redaction import redacted
from async_grpo.processes.offload import offloaded
from async_grpo.protocols import Generation
from async_grpo.rewards.adapter.result import excerpt
from async_grpo.types import Completion, Outcome, Prompt, Sampling, Session

MAX_FAILURE_CHARACTERS = 4000  # of the reason why a trajectory cannot be scored

Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as in OpenAI's API


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the part of a prompt's row that an environment receives: all but the model's own token ids."""
    return {name: value for name, value in prompt.row.items() if name != "input_token_ids"}


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the row's prompt if it is a conversation, else []."""
    prompt = row.get("messages", row.get("prompt"))
    is_conversation = isinstance(prompt, list) and "input_token_ids" not in row
    return list(prompt) if is_conversation else []


def trusted_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that are the user's data: the row's conversation, and its `input` as a message of the user."""
    messages = messages_of(row)
    text = row.get("input")
    if isinstance(text, str):
        messages.append({"role": "user", "content": text})
    return messages


class Whole(str):
    """A text that is the whole history, not an addition to it."""


class Foreign(str):
    """A text that comes after everything so far, and whose control tokens stay plain text (see `control_tokens`)."""


Context = np.ndarray | Sequence[int] | Sequence[Message] | str


class SharedContext:
    """A context that several turns continue, rendered and tokenized once.

    Args:
        context: The history of each of the turns.
        size: Number of bytes in which the context was received.
    """

    def __init__(self, context: Context, size: int) -> None:
        self.context = context
        self.size = size
        self._preparation: asyncio.Task[EngineInput] | None = None

    async def prepare(self, make: Callable[[], Awaitable[EngineInput]]) -> EngineInput:
        """Return or raise what `make` returned or raised for the first turn."""
        if self._preparation is None:
            self._preparation = asyncio.ensure_future(make())
            # asyncio logs an error that nobody retrieves, which happens if all turns are cancelled meanwhile
            self._preparation.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._preparation)


@dataclass(frozen=True)
class Reply:
    """A turn of the policy."""

    message: dict[str, Any]  # content and tool calls, as in OpenAI's API
    text: str  # as it was sampled, without the end token, with the text that stopped it
    completion: Completion
    prompt_tokens: int  # number of tokens that the engine read


class TrajectoryClient:
    """The connection of one trajectory to the engines. Every turn is recorded, token by token.

    Args:
        generation: The engines.
        recorder: Records the turns.
        prompt: The prompt that the trajectory is about.
        member: Index of the trajectory in the prompt's group.
        limits: Limits of the trajectory.
        sampling: Sampling settings of an evaluation; None keeps the run's.

    Attributes:
        failure: Error of an engine, which the run must learn of even if the program catches it.
        is_over: The limit that the trajectory has reached; "" if it has reached none.
        at_limit: Makes the result of a trajectory that a limit ends. Programs replace it, because they know the rewards.
    """

    def __init__(
        self,
        generation: Generation,
        recorder: TrajectoryRecorder,
        prompt: Prompt,
        member: int,
        limits: TrajectoryLimits,
        sampling: Sampling | None = None,
    ) -> None:
        self.prompt = prompt
        self.recorder = recorder
        self.limits = limits
        self.failure: AsyncGrpoError | None = None
        self.is_over = ""
        self.at_limit: Callable[[], Completion] = self.trajectory
        self._num_requests = 0  # includes turns under way: an agent may request many at once
        self._generation = generation
        self._sampling = sampling or Sampling()
        self._session = Session(member)
        self._started_at = time.monotonic()

    async def complete(
        self,
        context: Context | SharedContext,
        *,
        tools: Tools | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """Return the policy's next turn.

        Args:
            context: The history: all tokens so far, or all messages so far, or a text that comes after everything so far.
                A `Whole` is all text so far. Control tokens in a `Foreign` stay plain text.
            tools: JSON schemas of the tools, for the chat template. Without them, nothing in the turn is a call.
            max_tokens: Limit of this turn.
            stop: Texts that end the turn.

        Raises:
            TrajectoryOver: The trajectory has used up its turns or tokens (`--max-turns`, `--max-generation-tokens`). A
                request that is refused counts as a turn, too.
            ConfigurationError: The chat template refuses the messages, or the prompt is empty or has token ids that the
                model does not know.
        """
        # A program that only meets refusals would otherwise never let the event loop end its time
        await asyncio.sleep(0)
        try:
            engine_input = await self._prepare(context, tools)
            room_tokens = self._room_tokens(engine_input)
        except TrajectoryOver as limit:
            self.is_over = self.is_over or str(limit)
            raise
        # An earlier request may have been too long; this one is not
        self.is_over = ""
        token_limits = [room_tokens, max_tokens, self.limits.turn_tokens]
        sampling = replace(
            self._sampling,
            max_tokens=min(limit for limit in token_limits if limit is not None),
            stop=tuple(stop),
        )
        completion = await self._generate(engine_input, sampling)
        message = await self.recorder.add(engine_input, completion, stop, tools=bool(tools))
        return Reply(message, completion.text, completion, len(engine_input.token_ids))

    async def _prepare(self, context: Context | SharedContext, tools: Tools | None) -> EngineInput:
        """Count the request, and return what the engine is to read."""
        if self._num_requests == self.limits.turns:
            raise TrajectoryOver(f"{self.limits.turns} turns (--max-turns)")
        self._num_requests += 1
        if isinstance(context, SharedContext):
            shared = context
            engine_input = await shared.prepare(
                lambda: self._engine_input(shared.context, tools, shared.size)
            )
        else:
            engine_input = await self._engine_input(context, tools)
        refuse(not len(engine_input.token_ids), "the prompt is empty: there is nothing to go on with")
        return engine_input

    async def _engine_input(self, context: Context, tools: Tools | None, size: int = 0) -> EngineInput:
        """Render and tokenize the context, as its type asks for."""
        if isinstance(context, Whole):
            return await self.recorder.prepare_text(Rendered(str(context)))
        if isinstance(context, str):
            is_foreign = isinstance(context, Foreign)
            return await self.recorder.prepare_next_text(str(context), is_foreign=is_foreign)
        if len(context) and isinstance(context[0], Mapping):
            messages: Any = context
            return await self.recorder.prepare_messages(messages, tools, size)
        if len(context) > self.limits.tokens:
            raise TrajectoryOver(too_long(self.limits.tokens))
        num_characters = CHARACTERS_PER_TOKEN * len(context)
        token_ids = await offloaded(num_characters, _checked_ids, context, self.limits.vocabulary)
        return await self.recorder.prepare_tokens(token_ids)

    def _room_tokens(self, engine_input: EngineInput) -> int:
        """Return how many tokens the sequence still has room for.

        Raises:
            TrajectoryOver: There is no room left.
        """
        max_new_tokens = self._sampling.max_tokens or self.limits.new_tokens
        longest = min(engine_input.prompt_tokens + max_new_tokens, self.limits.tokens)
        room_tokens = longest - len(engine_input.token_ids)
        if room_tokens < 1:
            raise TrajectoryOver(too_long(longest))
        return room_tokens

    async def _generate(self, engine_input: EngineInput, sampling: Sampling) -> Completion:
        """Have an engine sample one completion."""
        request = replace(self.prompt, token_ids=engine_input.token_ids)
        try:
            stream = self._generation.generate(request, 1, sampling, self._session)
            async with aclosing(stream) as completions:
                return await anext(completions)
        except AsyncGrpoError as error:
            self.failure = error
            raise

    def trajectory(
        self,
        reward: float | None = None,
        *,
        turn_rewards: Sequence[float] = (),
        states: Sequence[str] = (),
        failure: str = "",
        truncated: bool | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> Completion:
        """Return everything so far as one completion, with how it ended.

        Args:
            reward: The reward that the environment itself gives.
            turn_rewards: The rewards that the environment gives, one per turn.
            states: Name of the state that each turn met, for GiGPO.
            failure: Why the trajectory cannot be scored; "" if it can.
            truncated: A limit cut the trajectory off, so that its reward says little. By default, true if a limit was
                reached or the last turn has no end token.
            numbers: Values for the metrics.

        Raises:
            ValueError: The number of rewards or states is not the number of turns.
        """
        num_turns = self.recorder.num_turns
        for name, values in (("turn_rewards", turn_rewards), ("states", states)):
            if values and len(values) != num_turns:
                raise ValueError(f"{len(values)} {name} for {num_turns} turns")
        # Numbers and failure go into metrics and samples, and a program may put a key into a name or an exception
        metrics = {redacted(str(name)): float(value) for name, value in (numbers or {}).items()}
        metrics["seconds"] = time.monotonic() - self._started_at
        outcome = Outcome(
            reward=None if reward is None else float(reward),
            failure=excerpt(failure, MAX_FAILURE_CHARACTERS),
            turn_rewards=tuple(float(value) for value in turn_rewards),
            states=tuple(str(state) for state in states),
            numbers=metrics,
        )
        return self.recorder.finish(self._session.member, outcome, bool(self.is_over) or truncated)


def _checked_ids(context: Any, vocabulary: int) -> np.ndarray:
    """Return the token ids, (N,) int32, in an array that nobody else has.

    Raises:
        ConfigurationError: The context is something else, or has ids that the model does not know.
    """
    ids = np.array(context)
    if not ids.size:
        return ids.astype(np.int32)
    is_list_of_integers = ids.ndim == 1 and ids.dtype.kind in "iu"
    if is_list_of_integers and ids.min() >= 0 and ids.max() < vocabulary:
        return ids.astype(np.int32)
    expected = f"text, messages or token ids from 0 to {vocabulary - 1}"
    raise ConfigurationError(f"the prompt must be {expected}, not {context[:20]!r:.200}")
