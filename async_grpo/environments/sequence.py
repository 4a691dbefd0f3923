"""`TrajectorySequence`: the tokens of turns that continue each other. `EngineInput`: the input of the next turn."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np

from async_grpo.environments.control_tokens import Rendered
from async_grpo.types import Completion, ImageReference, Turn


@dataclass(frozen=True)
class RecordedTurn:
    """A turn, and the tokens that the engine sampled in it."""

    turn: Turn
    completion: Completion


@dataclass(frozen=True)
class TurnEnd:
    """The position at which a turn ends in its sequence."""

    num_tokens: int
    num_characters: int
    num_images: int = 0


NO_END = TurnEnd(0, 0)


@dataclass
class TrajectorySequence:
    """The tokens and the text of consecutive turns, each of which continues the turn before.

    Attributes:
        breaks: Positions in the text that no token spans (see `control_tokens`). Equal texts with different breaks have
            different tokens.
        images: Images of the sequence, in the order of their tokens.
    """

    token_ids: np.ndarray  # (N,) int32
    text: str
    breaks: tuple[int, ...] = ()
    ends: list[TurnEnd] = field(default_factory=list)  # end of each turn
    turns: list[RecordedTurn] = field(default_factory=list)
    images: tuple[ImageReference, ...] = ()

    @property
    def end(self) -> TurnEnd:
        """Return the end of the last turn."""
        return self.ends[-1]

    def is_history_of(self, conversation: Rendered, end: TurnEnd) -> bool:
        """Return whether the conversation begins with this sequence up to the end of a turn.

        Text, breaks and images must be equal. Then the tokens are equal, too.
        """
        if not conversation.text.startswith(self.text[: end.num_characters]):
            return False
        if conversation.images[: end.num_images] != self.images[: end.num_images]:
            return False
        breaks = _breaks_before(conversation.breaks, end.num_characters)
        return breaks == _breaks_before(self.breaks, end.num_characters)

    def history_images(self, index: int) -> tuple[ImageReference, ...]:
        """Return the images that the engine read before it sampled a turn."""
        return self.images[: self.ends[index].num_images]


def _breaks_before(breaks: tuple[int, ...], place: int) -> tuple[int, ...]:
    return breaks[: bisect_left(breaks, place)]


def text_after(rendered: Rendered, end: TurnEnd) -> Rendered:
    """Return the text after the end of a turn."""
    num_characters = end.num_characters
    first = bisect_right(rendered.breaks, num_characters)
    # numpy is fast. This runs in the event loop, and a text of 4 MB may have a break at every tenth character
    breaks = np.subtract(rendered.breaks[first:], num_characters, dtype=np.int64, casting="unsafe").tolist()
    return Rendered(rendered.text[num_characters:], tuple(breaks), rendered.images[end.num_images :])


@dataclass(frozen=True)
class EngineInput:
    """The input that the engine reads in one turn."""

    token_ids: np.ndarray  # (N,) int32, the whole sequence so far
    rendered: Rendered  # the text of `token_ids`
    num_new: int  # number of tokens at the end that are new in this turn
    new_text: str  # the text of the new tokens
    continued: TrajectorySequence | None  # the sequence that the turn continues; None if it begins one

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens that the engine read in the first turn of the sequence."""
        if self.continued is None:
            return len(self.token_ids)
        return len(self.continued.turns[0].turn.before)
