"""`TrajectorySequence`: turns that continue each other token by token, and the input of the next turn."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from async_grpo.environments.control_tokens import Rendered
from async_grpo.types import Completion, Turn


@dataclass(frozen=True)
class RecordedTurn:
    """A turn with what the engine sampled in it."""

    turn: Turn
    completion: Completion


@dataclass(frozen=True)
class TurnEnd:
    """Where a turn ends in its sequence."""

    num_tokens: int
    num_characters: int


@dataclass
class TrajectorySequence:
    """The tokens of turns that continue each other, and their text.

    Attributes:
        breaks: Places in the text that no token spans (see `control_tokens`). Equal texts with different breaks have
            different tokens.
    """

    token_ids: np.ndarray  # (N,) int32
    text: str
    breaks: tuple[int, ...] = ()
    ends: list[TurnEnd] = field(default_factory=list)  # of its turns
    turns: list[RecordedTurn] = field(default_factory=list)

    def is_history_of(self, conversation: Rendered, num_characters: int) -> bool:
        """Return whether the conversation begins with the first `num_characters` of this sequence, with the same tokens."""
        if not conversation.text.startswith(self.text[:num_characters]):
            return False
        breaks = _breaks_before(conversation.breaks, num_characters)
        return breaks == _breaks_before(self.breaks, num_characters)


def _breaks_before(breaks: tuple[int, ...], place: int) -> tuple[int, ...]:
    return breaks[: bisect_left(breaks, place)]


def text_after(rendered: Rendered, num_characters: int) -> Rendered:
    """Return the text without its first `num_characters`."""
    first = bisect_right(rendered.breaks, num_characters)
    # By numpy, because a text of 4 MB may have a break at every tenth character, and the event loop waits for this
    breaks = np.subtract(rendered.breaks[first:], num_characters, dtype=np.int64, casting="unsafe").tolist()
    return Rendered(rendered.text[num_characters:], tuple(breaks))


@dataclass(frozen=True)
class EngineInput:
    """What the engine reads in one turn."""

    token_ids: np.ndarray  # (N,) int32, the sequence so far
    rendered: Rendered  # the text of `token_ids`
    num_new: int  # number of tokens at the end that no earlier turn of the sequence contains
    new_text: str  # the text of the new tokens
    continued: TrajectorySequence | None  # the sequence that the turn continues; None if it begins one

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens of the sequence that stand before its first turn."""
        if self.continued is None:
            return len(self.token_ids)
        return len(self.continued.turns[0].turn.before)
