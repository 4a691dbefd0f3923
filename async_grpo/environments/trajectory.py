"""What an engine saw and sampled for one trajectory, token by token: nothing is ever tokenised a second time.

A turn goes on where the history that it is asked after begins with what the engine saw and sampled: its tokens are kept,
and only what is new is tokenised. Where it does not (a template that drops earlier thoughts or trims white space, another
conversation), the turn begins a sequence of its own, of the tokens that the engine is given; both are trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from async_grpo.environments.chat import Chat, Message, before_any, key_of, message_of
from async_grpo.types import Completion, FinishReason, Outcome, Turn

NOTHING = np.empty(0, np.int32)
NO_TOKENS = [NOTHING, np.empty(0, np.float32), NOTHING]


@dataclass
class _Sequence:
    """Tokens that one engine request after the other went on with, and their text as far as it is known."""

    token_ids: np.ndarray
    text: str
    marks: list[tuple[int, int]] = field(default_factory=list)  # (tokens, characters) at the end of each turn
    turns: list[tuple[int, Turn, Completion]] = field(default_factory=list)  # with their numbers in time


@dataclass(frozen=True)
class Ask:
    """What the engine is asked to go on with."""

    token_ids: np.ndarray  # (N,) int32
    text: str
    new: int  # of its tokens, those that no engine was given before in this sequence
    said: str  # their text
    goes_on: _Sequence | None

    @property
    def prompt_tokens(self) -> int:
        """Of its sequence, those before the first turn."""
        return len(self.goes_on.turns[0][1].before) if self.goes_on else len(self.token_ids)


class Recorder:
    """The sequences of one trajectory. `ask_*` finds how a turn goes on, `add` notes what was sampled."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._sequences: list[_Sequence] = []
        self._raw: dict[str, str] = {}  # what was sampled, by the message that it was handed out as
        self.num_turns = 0

    def ask_tokens(self, token_ids: np.ndarray) -> Ask:
        """Of all tokens so far, as ids."""
        fitting = [s for s in self._sequences if np.array_equal(token_ids[: len(s.token_ids)], s.token_ids)]
        if not fitting:
            return Ask(token_ids, text := self.chat.decode(token_ids, NOTHING), len(token_ids), text, None)
        goes_on = max(fitting, key=lambda sequence: len(sequence.token_ids))
        return self._continued(goes_on, token_ids[len(goes_on.token_ids) :])

    def ask_more(self, text: str) -> Ask:
        """Of the last sequence, and this text after it."""
        if not self._sequences:
            return self.ask_text(text)
        return self._continued(self._sequences[-1], self.chat.encode(text), text)

    def ask_messages(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Ask:
        """Of a conversation, as the chat template writes it."""
        rendered = self.chat.render([self._as_sampled(message) for message in messages], tools)
        return self.ask_text(rendered, begins=False)

    def ask_text(self, whole: str, *, begins: bool = True) -> Ask:
        """Of all text so far. `begins`: it lacks the special tokens that a sequence begins with."""
        fitting = [s for s in self._sequences if whole.startswith(s.text)]
        if fitting:
            goes_on = max(fitting, key=lambda sequence: len(sequence.text))
            text = whole[len(goes_on.text) :]
            return self._continued(goes_on, self.chat.encode(text), text)
        # It may have turned off from a history at the end of one of its turns: these tokens are kept
        tokens, characters, source = 0, 0, NOTHING
        for sequence in self._sequences:
            for at_token, at_character in sequence.marks:
                if at_character > characters and whole.startswith(sequence.text[:at_character]):
                    tokens, characters, source = at_token, at_character, sequence.token_ids
        new = self.chat.encode(whole[characters:], begins=begins and not tokens)
        ids = np.concatenate([source[:tokens], new])
        return Ask(ids, whole, len(ids), whole, None)

    def add(
        self, ask: Ask, completion: Completion, stop: Sequence[str] = (), *, tools: bool = False
    ) -> dict[str, Any]:
        """Note a turn; returns it as a message, up to the text that should `stop` it. Without `tools` nothing is a call."""
        for array in completion.arrays:  # the program has them, too
            array.flags.writeable = False
        sequence = ask.goes_on
        # It may have gone on meanwhile
        if sequence is None or len(sequence.token_ids) != len(ask.token_ids) - ask.new:
            sequence = _Sequence(NOTHING, "")
            self._sequences.append(sequence)
            ask = replace(ask, new=len(ask.token_ids))
        text = self.chat.decode(completion.token_ids, ask.token_ids)
        before = ask.token_ids[len(ask.token_ids) - ask.new :]
        fresh = not sequence.turns
        turn = Turn(before, len(completion), fresh, ask.said, text, self.num_turns)
        sequence.turns.append((self.num_turns, turn, completion))
        sequence.token_ids = np.concatenate([ask.token_ids, completion.token_ids])
        sequence.text = ask.text + text
        sequence.marks.append((len(sequence.token_ids), len(sequence.text)))
        self.num_turns += 1
        said = before_any(stop, completion.text)
        message = message_of(said, self.num_turns) if tools else {"role": "assistant", "content": said}
        self._raw[key_of(message)] = completion.text
        return message

    def finish(self, member: int, outcome: Outcome, truncated: bool | None) -> Completion:
        """The whole as one completion, its sequences one after the other, that of the last turn last; `truncated` if its
        last turn is (None)."""
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

    def _continued(self, goes_on: _Sequence, new: np.ndarray, text: str | None = None) -> Ask:
        text = self.chat.decode(new, goes_on.token_ids) if text is None else text
        token_ids = np.concatenate([goes_on.token_ids, new])
        return Ask(token_ids, goes_on.text + text, len(new), text, goes_on)

    def _as_sampled(self, message: Message) -> Message:
        raw = self._raw.get(key_of(message)) if message.get("role") == "assistant" else None
        return message if raw is None else {"role": "assistant", "content": raw}
