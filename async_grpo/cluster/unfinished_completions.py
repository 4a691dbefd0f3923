"""`UnfinishedCompletions`: the completions of a prompt that are not finished, with the tokens that lost engines sampled."""

from collections.abc import Mapping

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.types import Completion, Tokens


class UnfinishedCompletions:
    """The completions of one prompt that are not finished yet.

    Args:
        seeds: Seed of each completion, by its index in the group.
    """

    def __init__(self, seeds: dict[int, int]) -> None:
        self.seeds = seeds
        # Tokens that workers have reported so far, by index in the group
        self._tokens: dict[int, Tokens] = {}

    @property
    def progress(self) -> tuple[int, int]:
        """Return (number of unfinished completions, number of reported tokens), which changes with all progress."""
        num_tokens = sum(len(tokens) for tokens in self._tokens.values())
        return len(self.seeds), num_tokens

    @property
    def most_tokens(self) -> int:
        """Return the number of reported tokens of the longest completion."""
        return max((len(tokens) for tokens in self._tokens.values()), default=0)

    @property
    def begun(self) -> dict[int, Tokens] | None:
        """Return the tokens after which the next engine continues, by index in the group; None if no tokens were reported.

        With None, `generate` calls the engine without the argument `begun`. So an engine that never reports tokens does
        not need this parameter.
        """
        if not self._tokens:
            return None
        return {member: self._tokens[member] for member in self.seeds if member in self._tokens}

    def add_tokens(self, new_tokens: Mapping[int, Tokens]) -> None:
        """Append the tokens that were sampled since the last report, by index in the group.

        Raises:
            WorkerLost: The engine is broken; see `refuse_damaged`.
        """
        for member, new in new_tokens.items():
            refuse_damaged(new)
            tokens = self._tokens.get(member)
            self._tokens[member] = new if tokens is None else tokens + new

    def finish(self, completion: Completion) -> None:
        """Remove a completion, because it is finished.

        Raises:
            WorkerLost: The engine is broken; see `refuse_damaged`.
        """
        refuse_damaged(completion)
        del self.seeds[completion.member]


def refuse_damaged(tokens: Tokens) -> None:
    """Refuse tokens whose log-probs are not finite. They would make the loss of a whole step not finite.

    Raises:
        WorkerLost: The engine that sampled the tokens is broken.
    """
    is_damaged = ~np.isfinite(tokens.logprobs)
    if is_damaged.any():
        position = int(is_damaged.argmax())
        raise WorkerLost(
            f"the engine returned log-probs that are not finite: {int(is_damaged.sum())} of {len(tokens)}, the first one "
            f"({tokens.logprobs[position]}) at token {position}"
        )
