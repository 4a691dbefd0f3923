"""`TrajectoryClient`: the object through which a rollout program asks the policy for turns.

Every turn is a separate request to any engine that has room. Between turns, a trajectory occupies no engine.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_grpo.environments.chat import TrajectoryOver, too_long
from async_grpo.environments.config import ENFORCE, HINT, TrajectoryLimits
from async_grpo.environments.control_tokens import Rendered
from async_grpo.environments.images import (
    TrajectoryImages,
    refuse_images,
    row_conversation,
    without_values,
)
from async_grpo.environments.refusals import RefusalBrake
from async_grpo.environments.sequence import EngineInput
from async_grpo.environments.trajectory import CHARACTERS_PER_TOKEN, TrajectoryRecorder
from async_grpo.environments.typed_output import TypedOutput, with_instruction
from async_grpo.errors import AsyncGrpoError, ConfigurationError, RequestRefused
from async_grpo.experience.row_messages import Message
from async_grpo.metrics.free_numbers import IGNORED_PREFIX
from async_grpo.options.fields import refuse
from async_grpo.options.redaction import redacted
from async_grpo.processes.offload import offloaded
from async_grpo.protocols import Generation
from async_grpo.rewards.adapter.result import excerpt
from async_grpo.types import Completion, Outcome, Prompt, Sampling, Session

MAX_FAILURE_CHARACTERS = 4000  # limit for the reason why a trajectory cannot be scored

Tools = Sequence[Mapping[str, Any]]  # JSON schemas, as in OpenAI's API


def row_of(prompt: Prompt) -> dict[str, Any]:
    """Return the part of a prompt's row that an environment receives: all columns except the prompt's token ids."""
    return {name: value for name, value in prompt.row.items() if name != "input_token_ids"}


def trusted_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """Return the messages that come from the data set: the row's conversation, and its `input` as a user message."""
    messages = without_values(row_conversation(prompt))
    text = prompt.row.get("input")
    if isinstance(text, str):
        messages.append({"role": "user", "content": text})
    return messages


class Whole(str):
    """A text that is the whole history. A plain `str` is an addition to the history."""


class Foreign(str):
    """An addition to the history in which spelled control tokens stay plain text (see `control_tokens`)."""


Context = np.ndarray | Sequence[int] | Sequence[Message] | str


class SharedContext:
    """A context that several turns continue. It is rendered and tokenized only once.

    Args:
        context: The history before each of these turns.
        size: Number of bytes of the request that contained the context.
    """

    def __init__(self, context: Context, size: int) -> None:
        self.context = context
        self.size = size
        self._preparation: asyncio.Task[EngineInput] | None = None

    async def prepare(self, make: Callable[[], Awaitable[EngineInput]]) -> EngineInput:
        """Return the result of `make`, which is called only for the first turn. Its errors are raised in all turns."""
        if self._preparation is None:
            self._preparation = asyncio.ensure_future(make())
            # Retrieve an error even if all turns are cancelled meanwhile. Otherwise, asyncio would log it
            self._preparation.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._preparation)


@dataclass(frozen=True)
class Reply:
    """A turn of the policy."""

    message: dict[str, Any]  # message with content and tool calls, as in OpenAI's API
    text: str  # the sampled text without the end token, including a stop text that ended it
    completion: Completion
    prompt_tokens: int  # number of tokens that the engine read


class TrajectoryClient:
    """The connection of one trajectory to the engines. Every turn is recorded, token by token.

    Args:
        generation: The engines.
        recorder: Records the turns.
        prompt: The prompt from which the trajectory begins.
        member: Index of the trajectory in the prompt's group.
        limits: Limits of the trajectory.
        sampling: Sampling settings of an evaluation. None means the run's settings.

    Attributes:
        failure: The error of an engine; None if there was none. The error fails the run, even if the program catches it.
        is_over: The limit that the trajectory has reached; "" if it has reached none.
        ignored_fields: Number of requests with each field that the endpoint ignored.
        refusals: Delays the answers to requests that are refused again and again.
        at_limit: Function that returns the result of a trajectory that a limit ended. Programs replace it, because only
            they know the rewards so far.
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
        self.ignored_fields = Counter[str]()
        self.refusals = RefusalBrake()
        self.at_limit: Callable[[], Completion] = self.trajectory
        self._num_requests = 0  # number of requested turns; an agent may request several at the same time
        self._generation = generation
        chat_images = recorder.chat.images
        self._images = None if chat_images is None else TrajectoryImages(chat_images, prompt.ordinal)
        self._sampling = sampling or Sampling()
        self._session = Session(member)
        self._started_at = time.monotonic()

    @property
    def reads_images(self) -> bool:
        """Return whether the conversation may have images."""
        return self._images is not None

    async def complete(
        self,
        context: Context | SharedContext,
        *,
        tools: Tools | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        typed: TypedOutput | None = None,
    ) -> Reply:
        """Return the policy's next turn.

        Args:
            context: The history: all tokens so far, all messages so far, or a text. A plain text is added to the
                history so far, and a `Whole` text replaces it. Control tokens spelled in a `Foreign` text stay plain
                text.
            tools: JSON schemas of the tools, for the chat template. Without tools, the turn is not searched for calls.
            max_tokens: Maximum number of tokens in this turn.
            stop: Texts that end the turn.
            typed: The form that the turn must have; None if it may be any text.

        Raises:
            TrajectoryOver: The trajectory has used up its turns or tokens (`--max-turns`, `--max-generation-tokens`).
                Refused requests also count as turns.
            ConfigurationError: The chat template refuses the messages, or the prompt is empty or has token ids that the
                model does not know.
            RequestRefused: The form cannot be enforced.
        """
        # Let other tasks run. A program whose requests are all refused might never do so itself, and could then not be
        # ended at its time limit
        await asyncio.sleep(0)
        async with self.refusals.watching(TrajectoryOver, ConfigurationError):
            reply = await self._take_turn(context, tools, max_tokens, stop, typed)
        self.refusals.succeeded()
        return reply

    async def _take_turn(
        self,
        context: Context | SharedContext,
        tools: Tools | None,
        max_tokens: int | None,
        stop: Sequence[str],
        typed: TypedOutput | None,
    ) -> Reply:
        """Return the policy's next turn; see `complete`."""
        if tools:
            await self._check_tools()
        try:
            engine_input = await self._prepare(context, tools, typed)
            room_tokens = self._room_tokens(engine_input)
        except TrajectoryOver as limit:
            self.is_over = self.is_over or str(limit)
            raise
        # An earlier request may have set `is_over` because it was too long, but this request fits
        self.is_over = ""
        token_limits = [room_tokens, max_tokens, self.limits.turn_tokens]
        sampling = replace(
            self._sampling,
            max_tokens=min(limit for limit in token_limits if limit is not None),
            stop=tuple(stop),
            grammar=await self._grammar(typed, tools, engine_input),
        )
        completion = await self._generate(engine_input, sampling)
        message = await self.recorder.add(engine_input, completion, stop, tools=tools)
        return Reply(message, completion.text, completion, len(engine_input.token_ids))

    async def _grammar(
        self, typed: TypedOutput | None, tools: Tools | None, engine_input: EngineInput
    ) -> str:
        """Return the grammar that the engine enforces in the turn; "" if the policy samples freely."""
        chat = self.recorder.chat
        if typed is None or chat.typed_output != ENFORCE:
            return ""
        return await chat.grammars.grammar_of(typed, tools, engine_input.rendered.text)

    async def _check_tools(self) -> None:
        """Fail the run if calls of tools cannot be read. Otherwise, the policy would learn that calls have no effect."""
        try:
            await self.recorder.chat.reader.check_tools()
        except ConfigurationError as error:
            self.failure = error
            raise

    async def _prepare(
        self, context: Context | SharedContext, tools: Tools | None, typed: TypedOutput | None
    ) -> EngineInput:
        """Count the request as a turn, and return the input for the engine."""
        if self._num_requests == self.limits.turns:
            raise TrajectoryOver(f"{self.limits.turns} turns (--max-turns)")
        self._num_requests += 1
        instruction = ""
        if typed is not None and self.recorder.chat.typed_output == HINT:
            instruction = typed.instruction(has_tools=bool(tools))
        if isinstance(context, SharedContext):
            shared = context
            engine_input = await shared.prepare(
                lambda: self._engine_input(shared.context, tools, instruction, shared.size)
            )
        else:
            engine_input = await self._engine_input(context, tools, instruction)
        refuse(not len(engine_input.token_ids), "the prompt is empty, so there is nothing to continue")
        return engine_input

    async def _engine_input(
        self, context: Context, tools: Tools | None, instruction: str, size: int = 0
    ) -> EngineInput:
        """Render and tokenize the context, depending on its type.

        Args:
            context: A text, token ids or messages.
            tools: JSON schemas of the tools.
            instruction: Text that is added to messages; "" for none.
            size: Number of characters in the messages, if the caller knows it; otherwise 0.
        """
        if isinstance(context, Whole):
            return await self.recorder.prepare_text(Rendered(str(context)))
        if isinstance(context, str):
            is_foreign = isinstance(context, Foreign)
            return await self.recorder.prepare_next_text(str(context), is_foreign=is_foreign)
        if len(context) and isinstance(context[0], Mapping):
            messages: Any = context
            if instruction:
                messages = with_instruction(messages, instruction, self.recorder.chat.prompts.system_prompt)
            if self._images is None:
                refuse_images(messages)
                return await self.recorder.prepare_messages(messages, tools, size)
            messages, images = await self._images.taken_from(messages)
            return await self.recorder.prepare_messages(messages, tools, size, images)
        if len(context) > self.limits.tokens:
            raise TrajectoryOver(too_long(self.limits.tokens))
        num_characters = CHARACTERS_PER_TOKEN * len(context)
        token_ids = await offloaded(num_characters, _checked_ids, context, self.limits.vocabulary)
        return await self.recorder.prepare_tokens(token_ids)

    def _room_tokens(self, engine_input: EngineInput) -> int:
        """Return how many more tokens fit into the sequence.

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
        """Request one completion from an engine."""
        request = replace(
            self.prompt,
            token_ids=engine_input.token_ids,
            images=engine_input.rendered.images,
        )
        try:
            stream = self._generation.generate(request, 1, sampling, self._session)
            async with aclosing(stream) as completions:
                return await anext(completions)
        except RequestRefused:
            raise
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
        """Return the trajectory so far as one completion, together with its outcome.

        Args:
            reward: The environment's reward for the trajectory. None if the environment gives none.
            turn_rewards: The environment's rewards, one per turn.
            states: Name of the state before each turn, for GiGPO.
            failure: The reason why the trajectory cannot be scored; "" if it can.
            truncated: Whether a limit cut the trajectory off, so that its reward means little. With None, it counts as
                truncated if its last turn has no end token. A trajectory that reached a limit is always truncated.
            numbers: Values for the metrics.

        Raises:
            ValueError: The number of rewards or states differs from the number of turns.
        """
        num_turns = self.recorder.num_turns
        for name, values in (("turn_rewards", turn_rewards), ("states", states)):
            if values and len(values) != num_turns:
                raise ValueError(f"{len(values)} {name} for {num_turns} turns")
        # Names and failures are redacted, because they are written to files, and a program may put a secret into them
        metrics = {redacted(str(name)): float(value) for name, value in (numbers or {}).items()}
        metrics["seconds"] = time.monotonic() - self._started_at
        metrics["rewritten_histories"] = self.recorder.num_rewritten
        metrics["abandoned_turns"] = len(self.recorder.abandoned_numbers)
        for name, count in self.ignored_fields.items():
            metrics[f"{IGNORED_PREFIX}{name}"] = count
        outcome = Outcome(
            reward=None if reward is None else float(reward),
            failure=excerpt(failure, MAX_FAILURE_CHARACTERS),
            turn_rewards=tuple(float(value) for value in turn_rewards),
            states=tuple(str(state) for state in states),
            numbers=metrics,
        )
        return self.recorder.finish(
            self._session.member,
            outcome,
            bool(self.is_over) or truncated,
            drops_abandoned=self.limits.drops_abandoned,
        )


def _checked_ids(context: Any, vocabulary: int) -> np.ndarray:
    """Return the token ids in a new array (N,) int32.

    Raises:
        ConfigurationError: The context is not a list of token ids, or has ids that the model does not know.
    """
    ids = np.array(context)
    if not ids.size:
        return ids.astype(np.int32)
    is_list_of_integers = ids.ndim == 1 and ids.dtype.kind in "iu"
    if is_list_of_integers and ids.min() >= 0 and ids.max() < vocabulary:
        return ids.astype(np.int32)
    expected = f"text, messages or token ids from 0 to {vocabulary - 1}"
    raise ConfigurationError(f"the prompt must be {expected}, not {context[:20]!r:.200}")
