"""`TrajectoryClient`: what a rollout program talks with. Every turn is a request to whichever engine has room; between
turns it holds no place anywhere."""

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
from async_grpo.environments.trajectory import CHARACTERS_PER_TOKEN, Ask, TrajectoryRecorder
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.options.fields import refuse
from async_grpo.options.redaction import redacted
from async_grpo.processes.offload import offloaded
from async_grpo.protocols import Generation
from async_grpo.rewards.adapter.result import excerpt
from async_grpo.types import Completion, Outcome, Prompt, Sampling, Session

MAX_FAILURE_CHARACTERS = 4000  # of the reason why a trajectory cannot be scored


def row_of(prompt: Prompt) -> dict[str, Any]:
    """What an environment is told of the prompt: its row, without the model's own token ids."""
    return {name: value for name, value in prompt.row.items() if name != "input_token_ids"}


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The row's prompt, if it is a conversation."""
    said = row.get("messages", row.get("prompt"))
    return list(said) if isinstance(said, list) and "input_token_ids" not in row else []


def own_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages that are the user's data: the row's, or its text as a message of the user."""
    text = row.get("input")
    as_message = [{"role": "user", "content": text}] if isinstance(text, str) else []
    return messages_of(row) + as_message


class Whole(str):
    """All text so far, not what comes after it."""


class Foreign(str):
    """A text that comes after everything so far, and in which no control token is meant (see `control_tokens`)."""


Context = np.ndarray | Sequence[int] | Sequence[Message] | str


class SharedContext:
    """A context that several turns go on with, rendered and tokenised once. `size`: bytes that it came in."""

    def __init__(self, context: Context, size: int) -> None:
        self.context, self.size = context, size
        self._asking: asyncio.Task[Ask] | None = None

    async def ask(self, make: Callable[[], Awaitable[Ask]]) -> Ask:
        """Return what `make` made for the first turn, or raise what it raised."""
        if self._asking is None:
            self._asking = asyncio.ensure_future(make())
            # Read it even if all turns are cancelled meanwhile, or asyncio logs it as lost
            self._asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._asking)


@dataclass(frozen=True)
class Reply:
    """What the policy said."""

    message: dict[str, Any]  # content and tool calls, as clients of OpenAI's API know them
    text: str  # as it was sampled, without the end token, with the text that stopped it
    completion: Completion
    prompt_tokens: int  # that it was given


class TrajectoryClient:
    """One trajectory's way to the engines. What a program makes of it is recorded, token by token.

    Args:
        prompt: the row that it is about.
        member: which trajectory of the prompt's group.
        sampling: of an evaluation; None: as the run says.
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
        self.prompt, self.recorder, self.limits = prompt, recorder, limits
        self.failure: AsyncGrpoError | None = None  # of an engine: the run hears of it in any case
        self.is_over = ""  # the limit that was reached
        self.at_limit: Callable[[], Completion] = self.trajectory  # what it is then, as its program knows
        self._asked = 0  # turns, also those under way: an agent may ask for many at once
        self._generation, self._sampling = generation, sampling or Sampling()
        self._session, self._begun = Session(member), time.monotonic()

    async def complete(
        self,
        context: Context | SharedContext,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:
        """The policy's next turn.

        context: all tokens so far; all messages so far; a text that comes after everything so far (`Whole`: that is it;
        `Foreign`: control tokens that it spells are none).
        tools: their JSON schemas, for the chat template; without them, nothing that is said is a call.
        max_tokens: of this turn. stop: texts that end it.

        TrajectoryOver: it has had its turns or tokens (`--max-turns`, `--max-generation-tokens`). A refused
        request also counts as a turn.
        ConfigurationError: the chat template refuses the messages; there are no tokens, or they are none of the model.
        """
        await asyncio.sleep(0)  # or a program that only meets refusals would never let its time be up
        recorder, limits = self.recorder, self.limits
        try:
            if self._asked == limits.turns:
                raise TrajectoryOver(f"{limits.turns} turns (--max-turns)")
            self._asked += 1
            if isinstance(context, SharedContext):
                content, size = context.context, context.size
                ask = await context.ask(lambda: self._ask(content, tools, size))
            else:
                ask = await self._ask(context, tools)
            refuse(not len(ask.token_ids), "the prompt is empty: there is nothing to go on with")
            longest = ask.prompt_tokens + (self._sampling.max_tokens or limits.new_tokens)
            if (room := min(longest, limits.tokens) - len(ask.token_ids)) < 1:
                raise TrajectoryOver(too_long(min(longest, limits.tokens)))
        except TrajectoryOver as limit:
            self.is_over = self.is_over or str(limit)
            raise
        self.is_over = ""  # if a request was too long, this one is not
        most = min(limit for limit in (room, max_tokens, limits.turn_tokens) if limit is not None)
        sampling = replace(self._sampling, max_tokens=most, stop=tuple(stop))
        asked = replace(self.prompt, token_ids=ask.token_ids)
        try:
            async with aclosing(self._generation.generate(asked, 1, sampling, self._session)) as completions:
                completion = await anext(completions)
        except AsyncGrpoError as error:
            self.failure = error
            raise
        message = await recorder.add(ask, completion, stop, tools=bool(tools))
        return Reply(message, completion.text, completion, len(ask.token_ids))

    async def _ask(self, context: Context, tools: Sequence[Mapping[str, Any]] | None, size: int = 0) -> Ask:
        if isinstance(context, Whole):
            return await self.recorder.ask_text(Rendered(str(context)))
        if isinstance(context, str):
            return await self.recorder.ask_more(str(context), is_foreign=isinstance(context, Foreign))
        if len(context) and isinstance(context[0], Mapping):
            messages: Any = context
            return await self.recorder.ask_messages(messages, tools, size)
        if len(context) > self.limits.tokens:
            raise TrajectoryOver(too_long(self.limits.tokens))
        size = CHARACTERS_PER_TOKEN * len(context)
        ids = await offloaded(size, _checked_ids, context, self.limits.vocabulary)
        return await self.recorder.ask_tokens(ids)

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
        """Everything so far as one completion, and how it ended (see `Outcome`; `numbers` go into the metrics).

        truncated: it was cut off by a limit, so that its reward says little (default: if one was reached, or its last turn
        has no end).

        ValueError: rewards or states of other turns than there were.
        """
        count = self.recorder.num_turns
        for name, given in (("turn_rewards", turn_rewards), ("states", states)):
            if given and len(given) != count:
                raise ValueError(f"{len(given)} {name} for {count} turns")
        # The name of a number may hold a key, as the exception below may
        told = {redacted(str(name)): float(value) for name, value in (numbers or {}).items()}
        told["seconds"] = time.monotonic() - self._begun
        by_turn = tuple(map(float, turn_rewards)), tuple(map(str, states))
        # It goes into metrics and samples, and the exception of a program may hold a key
        failure = excerpt(failure, MAX_FAILURE_CHARACTERS)
        outcome = Outcome(None if reward is None else float(reward), failure, *by_turn, told)
        return self.recorder.finish(self._session.member, outcome, bool(self.is_over) or truncated)


def _checked_ids(context: Any, vocabulary: int) -> np.ndarray:
    """Return the ids, (N,) int32. ConfigurationError: they are no ids of the model."""
    ids = np.array(context)  # a copy, which nobody changes
    is_empty = not ids.size
    if is_empty or (ids.ndim == 1 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < vocabulary):
        return ids.astype(np.int32)
    wanted = f"the prompt must be text, messages or token ids from 0 to {vocabulary - 1}"
    raise ConfigurationError(f"{wanted}, not {context[:20]!r:.200}")
