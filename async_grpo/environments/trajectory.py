"""What an engine saw and sampled for one trajectory, token by token: nothing is ever tokenised a second time.

A turn goes on where the history that it is asked after begins with what the engine saw and sampled: its tokens are kept,
and only what is new is tokenised. Where it does not (a template that drops earlier thoughts or trims white space, another
conversation), the turn begins a sequence of its own, of the tokens that the engine is given; both are trained on.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from async_grpo.environments.chat import Chat, Message, before_any, message_key, message_of
from async_grpo.environments.control_tokens import Rendered
from async_grpo.processes.offload import offloaded
from async_grpo.types import Completion, FinishReason, Outcome, Turn

NOTHING = np.empty(0, np.int32)
NO_TOKENS = [NOTHING, np.empty(0, np.float32), NOTHING]
CHARACTERS_PER_TOKEN = 4  # to estimate the size of a text
CHARACTERS_PER_MESSAGE = 64  # that rendering one takes the time of
CHARACTERS_PER_TOOL = 512


@dataclass
class _Sequence:
    """Tokens that one engine request after the other went on with, and their text as far as it is known.

    breaks: places in the text that no token spans (see `control_tokens`). Equal texts with other breaks are other tokens.
    """

    token_ids: np.ndarray
    text: str
    breaks: tuple[int, ...] = ()
    marks: list[tuple[int, int]] = field(default_factory=list)  # (tokens, characters) at the end of each turn
    turns: list[tuple[int, Turn, Completion]] = field(default_factory=list)  # with their numbers in time

    def begins(self, whole: Rendered, characters: int) -> bool:
        """Tell whether so many of its first characters are those of `whole`, tokenised alike."""
        return whole.text.startswith(self.text[:characters]) and (
            _breaks_before(whole.breaks, characters) == _breaks_before(self.breaks, characters)
        )


def _breaks_before(breaks: tuple[int, ...], characters: int) -> tuple[int, ...]:
    return breaks[: bisect_left(breaks, characters)]


def _after(whole: Rendered, characters: int) -> Rendered:
    """Return what follows so many characters."""
    breaks = tuple(place - characters for place in whole.breaks if place > characters)
    return Rendered(whole.text[characters:], breaks)


@dataclass(frozen=True)
class Ask:
    """What the engine is asked to go on with."""

    token_ids: np.ndarray  # (N,) int32
    whole: Rendered  # its text
    new: int  # of its tokens, those that no engine was given before in this sequence
    said: str  # their text
    goes_on: _Sequence | None

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of its sequence that stand before the first turn."""
        return len(self.goes_on.turns[0][1].before) if self.goes_on else len(self.token_ids)


class TrajectoryRecorder:
    """The sequences of one trajectory. `ask_*` finds how a turn goes on, `add` notes what was sampled.

    Args:
        own: messages of the user's data. Their control tokens are meant, as where a row is tokenised without a game.
    """

    def __init__(self, chat: Chat, own: Sequence[Message] = ()) -> None:
        self.chat = chat
        self._own = {(message.get("role"), str(message.get("content"))): message for message in own}
        self._sequences: list[_Sequence] = []
        self._raw: dict[str, str] = {}  # what was sampled, by the message that it was handed out as
        self.num_turns = 0

    async def ask_tokens(self, token_ids: np.ndarray) -> Ask:
        """Go on after all tokens so far, as ids."""
        fitting = [s for s in self._sequences if np.array_equal(token_ids[: len(s.token_ids)], s.token_ids)]
        size = CHARACTERS_PER_TOKEN * len(token_ids)
        if not fitting:
            text = await offloaded(size, self.chat.decode, token_ids, NOTHING)
            return Ask(token_ids, Rendered(text), len(token_ids), text, None)
        goes_on = max(fitting, key=lambda sequence: len(sequence.token_ids))
        before, whole_text, breaks = goes_on.token_ids, goes_on.text, goes_on.breaks
        new = token_ids[len(before) :]
        text = await offloaded(size, self.chat.decode, new, before)
        return Ask(token_ids, Rendered(whole_text + text, breaks), len(new), text, goes_on)

    async def ask_more(self, text: str, *, is_foreign: bool = False) -> Ask:
        """Go on after the last sequence, and this text after it."""
        breaks = await offloaded(len(text), self.chat.breaks_of, text) if is_foreign else ()
        if not self._sequences:
            return await self.ask_text(Rendered(text, breaks))
        return await self._continued(self._sequences[-1], Rendered(text, breaks))

    async def ask_messages(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, size: int = 0
    ) -> Ask:
        """Go on after a conversation, as the chat template writes it. `size`: of all its texts, where that is known."""
        shown = [self._as_sampled(message) for message in messages]
        is_trusted = [
            sampled is not message or self._is_own(message)
            for sampled, message in zip(shown, messages, strict=True)
        ]
        texts = sum(len(content) for message in shown if isinstance(content := message.get("content"), str))
        size = max(size, texts + CHARACTERS_PER_MESSAGE * len(shown) + CHARACTERS_PER_TOOL * len(tools or ()))
        whole = await offloaded(size, self.chat.render_foreign, shown, tools, is_trusted)
        return await self.ask_text(whole, begins=False)

    async def ask_text(self, whole: Rendered, *, begins: bool = True) -> Ask:
        """Go on after all text so far. `begins`: it lacks the special tokens that a sequence begins with."""
        fitting = [s for s in self._sequences if s.begins(whole, len(s.text))]
        if fitting:
            goes_on = max(fitting, key=lambda sequence: len(sequence.text))
            return await self._continued(goes_on, _after(whole, len(goes_on.text)))
        # It may have turned off from a history at the end of one of its turns: these tokens are kept
        tokens, characters, source = 0, 0, NOTHING
        for sequence in self._sequences:
            for at_token, at_character in sequence.marks:
                if at_character > characters and sequence.begins(whole, at_character):
                    tokens, characters, source = at_token, at_character, sequence.token_ids
        new = await self._encoded(_after(whole, characters), begins=begins and not tokens)
        ids = np.concatenate([source[:tokens], new])
        return Ask(ids, whole, len(ids), whole.text, None)

    async def add(
        self, ask: Ask, completion: Completion, stop: Sequence[str] = (), *, tools: bool = False
    ) -> dict[str, Any]:
        """Note a turn; returns it as a message, up to the text that should `stop` it. Without `tools` nothing is a call."""
        for array in completion.arrays:  # the program has them, too
            array.flags.writeable = False
        size = CHARACTERS_PER_TOKEN * len(completion)
        text = await offloaded(size, self.chat.decode, completion.token_ids, ask.token_ids)
        sequence = ask.goes_on
        # It may have gone on meanwhile
        if sequence is None or len(sequence.token_ids) != len(ask.token_ids) - ask.new:
            sequence = _Sequence(NOTHING, "")
            self._sequences.append(sequence)
            ask = replace(ask, new=len(ask.token_ids))
        before = ask.token_ids[len(ask.token_ids) - ask.new :]
        fresh = not sequence.turns
        turn = Turn(before, len(completion), fresh, ask.said, text, self.num_turns)
        sequence.turns.append((self.num_turns, turn, completion))
        sequence.token_ids = np.concatenate([ask.token_ids, completion.token_ids])
        sequence.text = ask.whole.text + text
        sequence.breaks = ask.whole.breaks
        sequence.marks.append((len(sequence.token_ids), len(sequence.text)))
        self.num_turns += 1
        number = self.num_turns if tools else None
        message, key = await offloaded(len(completion.text), _handed_out, completion.text, stop, number)
        self._raw[key] = completion.text
        return message

    def finish(self, member: int, outcome: Outcome, truncated: bool | None) -> Completion:
        """Return the trajectory as one completion, sequences in order of their last turn.

        `truncated=None` takes the value of the last turn.
        """
        by_end = sorted(self._sequences, key=lambda sequence: sequence.turns[-1][0])
        in_order = [turn for sequence in by_end for turn in sequence.turns]
        numbers, turns, parts = zip(*in_order, strict=True) if in_order else ((), (), ())
        last: Completion | None = parts[-1] if parts else None
        by_kind = zip(*(part.arrays for part in parts), strict=True)
        token_ids, logprobs, versions = list(map(np.concatenate, by_kind)) or NO_TOKENS
        ends = None
        if last is not None and last.char_ends is not None:
            # The tokens of other turns end before the first of its characters
            own = [last.char_ends if part is last else np.zeros(len(part), np.int32) for part in parts]
            ends = np.concatenate(own)
        if truncated is None:
            truncated = last is not None and last.truncated
        rewards = tuple(outcome.turn_rewards[number] for number in numbers if outcome.turn_rewards)
        states = tuple(outcome.states[number] for number in numbers if outcome.states)
        return Completion(
            *(token_ids, logprobs, versions),
            finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
            text=last.text if last else "",
            char_ends=ends,
            member=member,
            turns=tuple(turns),
            outcome=replace(outcome, turn_rewards=rewards, states=states),
        )

    async def _continued(self, goes_on: _Sequence, more: Rendered) -> Ask:
        before, text, breaks = goes_on.token_ids, goes_on.text, goes_on.breaks
        new = await self._encoded(more)
        moved = tuple(len(text) + place for place in more.breaks)
        whole = Rendered(text + more.text, breaks + moved)
        return Ask(np.concatenate([before, new]), whole, len(new), more.text, goes_on)

    async def _encoded(self, text: Rendered, *, begins: bool = False) -> np.ndarray:
        options = {"begins": begins, "breaks": text.breaks}
        return await offloaded(len(text.text), self.chat.encode, text.text, **options)

    def _as_sampled(self, message: Message) -> Message:
        """Return the message as it was sampled, if it is one of the policy's; else the same object."""
        raw = self._raw.get(message_key(message)) if message.get("role") == "assistant" else None
        return message if raw is None else {"role": "assistant", "content": raw}

    def _is_own(self, message: Message) -> bool:
        content = message.get("content")
        return isinstance(content, str) and self._own.get((message.get("role"), content)) == message


def _handed_out(text: str, stop: Sequence[str], turn: int | None) -> tuple[dict[str, Any], str]:
    """Return the message that was said, with calls of tools if the turn has a number; and its key."""
    said = before_any(stop, text)
    message = {"role": "assistant", "content": said} if turn is None else message_of(said, turn)
    return message, message_key(message)
