"""`TrajectoryRecorder`: records what the engine read and sampled in one trajectory, token by token.

No text is tokenized twice. Tokenizing the sampled text could give other tokens, and the policy must be trained on the
tokens that it sampled. A turn continues a sequence if its history begins with everything that the engine read and
sampled in that sequence. Those tokens are kept, and only the new text is tokenized. All other turns begin a new
sequence. This happens if the chat template drops earlier thoughts or trims white space, and if an agent begins another
conversation. All sequences are trained on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_grpo.environments.abandoned import abandoned_numbers, abandoned_turns, without_turns
from async_grpo.environments.chat import Chat, before_any, message_of
from async_grpo.environments.control_tokens import Rendered
from async_grpo.environments.joined import NO_TOKEN_IDS, joined_completion
from async_grpo.environments.sampled_history import SampledHistory, SampledTurn, Spelling, spelled
from async_grpo.environments.sequence import (
    NO_END,
    EngineInput,
    RecordedTurn,
    TrajectorySequence,
    TurnEnd,
    text_after,
)
from async_grpo.errors import ConfigurationError
from async_grpo.experience.row_messages import Message
from async_grpo.experience.template_turns import lost_roles
from async_grpo.processes.offload import offloaded
from async_grpo.types import Completion, ImageReference, Outcome, Turn

CHARACTERS_PER_TOKEN = 4  # an estimate, to get the size of a text from its number of tokens
# Rendering one message, or the schema of one tool, takes as long as processing this many characters
CHARACTERS_PER_MESSAGE = 64
CHARACTERS_PER_TOOL = 512

TurnObserver = Callable[[Turn, Mapping[str, Any]], None]


class TrajectoryRecorder:
    """The sequences of one trajectory.

    Each turn takes two calls: one of the `prepare_` methods finds the sequence that the turn continues, and `add`
    records the sampled tokens. An agent may have several turns running at the same time.

    Args:
        chat: The tokenizer with its chat template.
        trusted_messages: Messages of the user's data. Control tokens that are spelled in them become control tokens, as
            in a row that is tokenized without an environment.
        observer: Function that is called with each recorded turn and its message.
        prompt_images: Images of the row. A first turn whose history is given as token ids reads these images.
    """

    def __init__(
        self,
        chat: Chat,
        trusted_messages: Sequence[Message] = (),
        observer: TurnObserver | None = None,
        prompt_images: tuple[ImageReference, ...] = (),
    ) -> None:
        self.chat = chat
        self._prompt_images = prompt_images
        self._observer = observer
        self.num_turns = 0
        self._trusted_messages = {
            (message.get("role"), str(message.get("content"))): message for message in trusted_messages
        }
        self._sequences: list[TrajectorySequence] = []
        self._history = SampledHistory()
        # Number of a turn -> number of turns that were recorded when the latest request with this turn's message arrived
        self._latest_requests: dict[int, int] = {}

    @property
    def num_rewritten(self) -> int:
        """Return the number of requests in which the chat template or the agent rewrote the policy's history."""
        return self._history.num_rewritten

    async def prepare_tokens(self, token_ids: np.ndarray) -> EngineInput:
        """Return the engine's input for a turn whose whole history is given as token ids (N,) int32."""
        histories = []
        for sequence in self._sequences:
            if np.array_equal(token_ids[: len(sequence.token_ids)], sequence.token_ids):
                histories.append(sequence)
        size = CHARACTERS_PER_TOKEN * len(token_ids)
        if not histories:
            images = self.chat.images_of_tokens(token_ids, self._prompt_images)
            text = await offloaded(size, self.chat.decode, token_ids, NO_TOKEN_IDS)
            return EngineInput(
                token_ids,
                rendered=Rendered(text, images=images),
                num_new=len(token_ids),
                new_text=text,
                continued=None,
            )
        history = max(histories, key=lambda sequence: len(sequence.token_ids))
        # Use a copy, because another turn may be added to the sequence while a thread decodes the tokens of this turn
        snapshot = replace(history)
        new_token_ids = token_ids[len(snapshot.token_ids) :]
        self.chat.images_of_tokens(new_token_ids, ())
        new_text = await offloaded(size, self.chat.decode, new_token_ids, snapshot.token_ids)
        return EngineInput(
            token_ids,
            rendered=Rendered(snapshot.text + new_text, snapshot.breaks, snapshot.images),
            num_new=len(new_token_ids),
            new_text=new_text,
            continued=history,
        )

    async def prepare_next_text(self, text: str, *, is_foreign: bool = False) -> EngineInput:
        """Return the engine's input for a turn that continues the last sequence with this text.

        Args:
            text: Text that follows everything that the engine has read and sampled in the sequence.
            is_foreign: Whether control tokens that are spelled in the text stay plain text (see `control_tokens`).
        """
        breaks = await offloaded(len(text), self.chat.breaks_of, text) if is_foreign else ()
        rendered = Rendered(text, breaks)
        if not self._sequences:
            return await self.prepare_text(rendered)
        return await self._continue(self._sequences[-1], rendered)

    async def prepare_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        size: int = 0,
        images: tuple[ImageReference, ...] = (),
    ) -> EngineInput:
        """Return the engine's input for a turn whose whole history is a conversation. The chat template renders it.

        Args:
            messages: The conversation. Its images are IMAGE_PARTs (`row_images`).
            tools: JSON schemas of the tools.
            size: Number of characters in the conversation, if the caller knows it; otherwise 0.
            images: The images of the conversation, in their order.
        """
        sampled_turns = await offloaded(size, self._history.turns_of, messages)
        for turn in sampled_turns.values():
            self._latest_requests[turn.number] = self.num_turns
        latest = max(sampled_turns, default=-1)
        renderings: dict[Spelling, Rendered] = {}
        refusal: ConfigurationError | None = None
        for spelling in self._history.spellings_to_try(has_turns=bool(sampled_turns)):
            try:
                text = await self._rendered(messages, sampled_turns, spelling, tools, size)
            except ConfigurationError as error:
                # Some templates refuse the answers of tools if the calls before them are part of a text
                refusal = error
                continue
            rendered = replace(text, images=images)
            renderings[spelling] = rendered
            if latest < 0 or await self._keeps(rendered, messages[latest:], sampled_turns[latest].number):
                self._history.last_spelling = spelling
                break
        else:
            if not renderings:
                assert refusal is not None, "each spelling was rendered or refused"
                raise refusal
            # No spelling continues the known tokens. STRUCTURED is the spelling that any other client would send
            rendered = renderings.get(Spelling.STRUCTURED) or next(iter(renderings.values()))
            self._history.num_rewritten += 1
        await offloaded(len(rendered.text), self.chat.warn_about_lost_roles, rendered.text, messages)
        return await self.prepare_text(rendered, begins=False)

    async def _rendered(
        self,
        messages: Sequence[Message],
        sampled_turns: Mapping[int, SampledTurn],
        spelling: Spelling,
        tools: Sequence[Any] | None,
        size: int,
    ) -> Rendered:
        """Return the conversation as the template writes it, with the policy's messages in one of their spellings.

        Args:
            messages: The conversation.
            sampled_turns: The turns from which messages of the policy were made, by the index of the message.
            spelling: The form of these messages.
            tools: JSON schemas of the tools.
            size: Number of characters in the conversation, if the caller knows it; otherwise 0.
        """
        spelled_messages = []
        is_trusted = []
        num_characters = 0
        for index, message in enumerate(messages):
            turn = sampled_turns.get(index)
            if turn is not None:
                message = spelled(message, turn, spelling, self.chat)
            spelled_messages.append(message)
            is_trusted.append(turn is not None or self._is_trusted(message))
            content = message.get("content")
            if isinstance(content, str):
                num_characters += len(content)
        num_characters += CHARACTERS_PER_MESSAGE * len(spelled_messages)
        num_characters += CHARACTERS_PER_TOOL * len(tools or ())
        return await offloaded(
            max(size, num_characters),
            self.chat.render_foreign,
            spelled_messages,
            tools,
            is_trusted,
        )

    async def _keeps(self, rendered: Rendered, latest_messages: Sequence[Message], turn_number: int) -> bool:
        """Return whether a rendered conversation continues the tokens of a turn, and contains the messages after it.

        Args:
            rendered: The conversation.
            latest_messages: The message of the turn, and those after it.
            turn_number: Number of the turn.
        """
        if await offloaded(len(rendered.text), lost_roles, rendered.text, latest_messages[1:]):
            return False
        for sequence in self._sequences:
            for recorded, end in zip(sequence.turns, sequence.ends, strict=True):
                is_the_turn = recorded.turn.number == turn_number
                if is_the_turn and sequence.is_history_of(rendered, end):
                    return True
        return False

    async def prepare_text(self, conversation: Rendered, *, begins: bool = True) -> EngineInput:
        """Return the engine's input for a turn whose whole history is given as text.

        Args:
            conversation: All text so far.
            begins: Whether to add the special tokens at the beginning of a sequence, if the turn begins a new sequence.
                A text that a chat template has rendered already contains them.
        """
        histories = []
        for sequence in self._sequences:
            if sequence.is_history_of(conversation, sequence.end):
                histories.append(sequence)
        if histories:
            # If several sequences have the same text, the newest is continued, because an agent that sampled a turn again
            # usually goes on with the new turn
            history = max(reversed(histories), key=lambda sequence: len(sequence.text))
            return await self._continue(history, text_after(conversation, history.end))
        # The turn begins a new sequence. If its history shares turns with another sequence, their sampled tokens are kept
        shared_token_ids, shared_end = self._longest_shared_history(conversation)
        new_token_ids = await self._encoded(
            text_after(conversation, shared_end),
            begins=begins and not len(shared_token_ids),
        )
        token_ids = np.concatenate([shared_token_ids, new_token_ids])
        return EngineInput(
            token_ids,
            rendered=conversation,
            num_new=len(token_ids),
            new_text=conversation.text,
            continued=None,
        )

    def _longest_shared_history(self, conversation: Rendered) -> tuple[np.ndarray, TurnEnd]:
        """Return the longest history that the conversation shares with a sequence, as tokens and its end.

        Only histories that end at the end of a turn are considered.
        """
        token_ids = NO_TOKEN_IDS
        longest_end = NO_END
        for sequence in self._sequences:
            for end in sequence.ends:
                is_longer = end.num_characters > longest_end.num_characters
                if is_longer and sequence.is_history_of(conversation, end):
                    token_ids = sequence.token_ids[: end.num_tokens]
                    longest_end = end
        return token_ids, longest_end

    async def _continue(self, history: TrajectorySequence, addition: Rendered) -> EngineInput:
        """Return the engine's input for a turn that adds text to a sequence."""
        # Use a copy, because another turn may be added to the sequence while a thread tokenizes the text of this turn
        snapshot = replace(history)
        new_token_ids = await self._encoded(addition)
        new_breaks = tuple(len(snapshot.text) + place for place in addition.breaks)
        return EngineInput(
            np.concatenate([snapshot.token_ids, new_token_ids]),
            rendered=Rendered(
                snapshot.text + addition.text,
                snapshot.breaks + new_breaks,
                snapshot.images + addition.images,
            ),
            num_new=len(new_token_ids),
            new_text=addition.text,
            continued=history,
        )

    async def _encoded(self, rendered: Rendered, *, begins: bool = False) -> np.ndarray:
        """Return the token ids of a text, (N,) int32, with as many placeholders for each image as it has features."""
        token_ids = await offloaded(
            len(rendered.text),
            self.chat.encode,
            rendered.text,
            begins=begins,
            breaks=rendered.breaks,
        )
        return self.chat.with_features(token_ids, rendered.images)

    def _is_trusted(self, message: Message) -> bool:
        """Return whether the message is one of `trusted_messages`."""
        content = message.get("content")
        if not isinstance(content, str | list):
            return False
        return self._trusted_messages.get((message.get("role"), str(content))) == message

    async def add(
        self,
        engine_input: EngineInput,
        completion: Completion,
        stop: Sequence[str] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Record a turn.

        Args:
            engine_input: What the engine read.
            completion: What the engine sampled.
            stop: Texts that end the turn. The recorded text includes them, and the returned message does not.
            tools: JSON schemas of the request's tools. Without tools, the text is not searched for calls.

        Returns:
            The turn as a message, whose text ends before the first of the `stop` texts.
        """
        # The rollout program gets the same arrays. They become read-only, so that it cannot change what is trained on
        for array in completion.arrays:
            array.flags.writeable = False
        text = await offloaded(
            CHARACTERS_PER_TOKEN * len(completion),
            self.chat.decode,
            completion.token_ids,
            engine_input.token_ids,
        )
        num_new = engine_input.num_new
        sequence = engine_input.continued
        # If another turn has continued the sequence meanwhile, this turn begins a new sequence with the same history
        if sequence is None or len(sequence.token_ids) != len(engine_input.token_ids) - num_new:
            sequence = TrajectorySequence(NO_TOKEN_IDS, "")
            self._sequences.append(sequence)
            num_new = len(engine_input.token_ids)
        turn = Turn(
            before=engine_input.token_ids[len(engine_input.token_ids) - num_new :],
            num_tokens=len(completion),
            fresh=not sequence.turns,
            before_text=engine_input.new_text,
            text=text,
            number=self.num_turns,
            images=engine_input.rendered.images[len(sequence.images) :],
        )
        self.num_turns += 1
        sequence.turns.append(RecordedTurn(turn, completion))
        sequence.token_ids = np.concatenate([engine_input.token_ids, completion.token_ids])
        sequence.text = engine_input.rendered.text + text
        sequence.breaks = engine_input.rendered.breaks
        sequence.images = engine_input.rendered.images
        sequence.ends.append(TurnEnd(len(sequence.token_ids), len(sequence.text), len(sequence.images)))

        parts = await self.chat.reader.read(
            before_any(stop, completion.text), engine_input.rendered.text, tools
        )
        message = message_of(parts, turn.number)
        self._history.add(message, SampledTurn(turn.number, completion.text, parts.thought))
        if self._observer is not None:
            self._observer(turn, message)
        return message

    async def shortened(self, text: str, max_tokens: int) -> str:
        """Return the text. If it has more than `max_tokens` tokens, return its beginning and a sentence that says so."""
        return await offloaded(len(text), self.chat.shortened, text, max_tokens)

    @property
    def abandoned_numbers(self) -> frozenset[int]:
        """Return the numbers of the turns that the agent threw away; see `abandoned`."""
        return abandoned_numbers(self._sequences, self._latest_requests)

    def finish(
        self, member: int, outcome: Outcome, truncated: bool | None, *, drops_abandoned: bool = False
    ) -> Completion:
        """Return the trajectory as one completion. Its sequences are in the order of their last turns.

        Args:
            member: Index of the trajectory in its group.
            outcome: How the trajectory ended. Rewards and states of the turns are in the order in which turns were
                taken.
            truncated: Whether a limit cut the trajectory off. None means that it depends on the last turn.
            drops_abandoned: Whether turns that the agent threw away are left out of what is trained on.
        """
        dropped_numbers = self.abandoned_numbers if drops_abandoned else frozenset()
        if not dropped_numbers:
            return joined_completion(self._sequences, member, outcome, truncated)
        sequences = without_turns(self._sequences, dropped_numbers)
        completion = joined_completion(sequences, member, outcome, truncated)
        return replace(completion, abandoned=abandoned_turns(self._sequences, dropped_numbers))
