"""`UnfinishedCompletions`: the completions of a prompt that are not finished, with the tokens that lost engines sampled."""

from collections.abc import Mapping

from async_grpo.types import Tokens


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
        """Append the tokens that were sampled since the last report, by index in the group."""
        for member, new in new_tokens.items():
            tokens = self._tokens.get(member)
            self._tokens[member] = new if tokens is None else tokens + new
