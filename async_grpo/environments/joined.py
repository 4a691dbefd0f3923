"""`joined_completion`: joins the sequences of a trajectory to one completion, which is scored and trained on."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from async_grpo.allowed_tokens import AllowedTokens
from async_grpo.environments.sequence import TrajectorySequence
from async_grpo.types import Completion, FinishReason, Outcome, Tokens, Turn

NO_TOKEN_IDS = np.empty(0, np.int32)
NO_TOKENS = Tokens(token_ids=NO_TOKEN_IDS, logprobs=np.empty(0, np.float32), versions=NO_TOKEN_IDS)

_Value = TypeVar("_Value")


def joined_completion(
    sequences: Sequence[TrajectorySequence], member: int, outcome: Outcome, truncated: bool | None
) -> Completion:
    """Return the sequences as one completion, in the order of their last turns.

    Args:
        sequences: The sequences of the trajectory.
        member: Index of the trajectory in its group.
        outcome: How the trajectory ended. Rewards and states of the turns are in the order in which turns were taken.
        truncated: Whether a limit cut the trajectory off. None means that it depends on the last turn.
    """
    turns: list[Turn] = []
    completions: list[Completion] = []
    for sequence in sorted(sequences, key=_last_turn_number):
        turns += [recorded.turn for recorded in sequence.turns]
        completions += [recorded.completion for recorded in sequence.turns]
    last = completions[-1] if completions else None
    if truncated is None:
        truncated = last is not None and last.truncated
    return Completion(
        *_joined(completions).arrays,
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        text=last.text if last else "",
        char_ends=_char_ends_in_last_text(completions),
        member=member,
        turns=tuple(turns),
        allowed=AllowedTokens.joined(
            [completion.allowed for completion in completions],
            [len(completion) for completion in completions],
        ),
        outcome=replace(
            outcome,
            turn_rewards=_in_order_of(turns, outcome.turn_rewards),
            states=_in_order_of(turns, outcome.states),
        ),
    )


def _last_turn_number(sequence: TrajectorySequence) -> int:
    return sequence.turns[-1].turn.number


def _joined(completions: Sequence[Completion]) -> Tokens:
    """Return the tokens of all completions, concatenated."""
    if not completions:
        return NO_TOKENS
    return Tokens(
        token_ids=np.concatenate([completion.token_ids for completion in completions]),
        logprobs=np.concatenate([completion.logprobs for completion in completions]),
        versions=np.concatenate([completion.versions for completion in completions]),
    )


def _char_ends_in_last_text(completions: Sequence[Completion]) -> np.ndarray | None:
    """Return the position (T,) int32 at which each token ends in the last turn's text; None if it is not known."""
    if not completions or completions[-1].char_ends is None:
        return None
    # Tokens of the other turns come before the first character of the last turn's text, so they end at 0
    ends_of_others = [np.zeros(len(completion), np.int32) for completion in completions[:-1]]
    return np.concatenate([*ends_of_others, completions[-1].char_ends])


def _in_order_of(turns: Sequence[Turn], values: Sequence[_Value]) -> tuple[_Value, ...]:
    """Return the values in the order of `turns`. The argument has them in the order in which the turns were taken."""
    if not values:
        return ()
    return tuple(values[turn.number] for turn in turns)
