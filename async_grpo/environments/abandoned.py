"""Turns that an agent threw away: retries, resampled turns, and choices of `n` that it did not use.

For example, an agent samples turns A and B after the same history, and its next request continues B. Then A is abandoned.
In general, turn A is abandoned if three conditions are met:

- another turn B was sampled after exactly the same history,
- a request that came after both A and B continued B,
- no request continued A.

At the end of a trajectory, no turn has been continued, so none is abandoned. If A and B have the same tokens, only the
later one counts as continued. The conversations of sub-agents have different histories, so their turns are not abandoned.
But if two sub-agents begin with the same tokens, the turns of the first one may look like retries.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from async_grpo.environments.sequence import RecordedTurn, TrajectorySequence
from async_grpo.types import ImageReference, Turn

NO_TOKEN_IDS = np.empty(0, np.int32)
# Stands for the number of the latest turn that continued a turn, if no turn continued it
NEVER = -1


def abandoned_numbers(
    sequences: Sequence[TrajectorySequence], latest_requests: Mapping[int, int]
) -> frozenset[int]:
    """Return the numbers of the abandoned turns.

    Args:
        sequences: The sequences of the trajectory.
        latest_requests: Turns whose messages were part of a later request. Such a turn was continued, even if the chat
            template rewrote its message, so that the later request does not contain its tokens. Maps the number of such
            a turn to the number of turns that were recorded when the latest such request arrived.
    """
    if len(sequences) < 2:
        # Two turns with the same history are always in different sequences
        return frozenset()
    abandoned: set[int] = set()
    for siblings in _turns_by_history(sequences):
        continuation_by_number = {}
        for sequence, index in siblings:
            number = sequence.turns[index].turn.number
            latest_turn = _latest_continuation(sequence, index, sequences)
            continuation_by_number[number] = max(latest_turn, latest_requests.get(number, NEVER))
        latest_continuation = max(continuation_by_number.values())
        for number, continuation in continuation_by_number.items():
            if continuation == NEVER and latest_continuation > number:
                abandoned.add(number)
    return frozenset(abandoned)


def _turns_by_history(
    sequences: Sequence[TrajectorySequence],
) -> list[list[tuple[TrajectorySequence, int]]]:
    """Return groups of two or more turns with the same history, each as a sequence and the index of its turn in it."""
    turns_by_length: dict[int, list[tuple[TrajectorySequence, int]]] = {}
    for sequence in sequences:
        for index in range(len(sequence.turns)):
            length = _history_tokens(sequence, index)
            turns_by_length.setdefault(length, []).append((sequence, index))
    groups = []
    for length, turns in turns_by_length.items():
        if len(turns) < 2:
            continue
        turns_by_history: dict[Any, list[tuple[TrajectorySequence, int]]] = {}
        for sequence, index in turns:
            history = (sequence.token_ids[:length].tobytes(), sequence.history_images(index))
            turns_by_history.setdefault(history, []).append((sequence, index))
        groups += [siblings for siblings in turns_by_history.values() if len(siblings) > 1]
    return groups


def _history_tokens(sequence: TrajectorySequence, index: int) -> int:
    """Return the number of tokens that the engine read before it sampled a turn."""
    return sequence.ends[index].num_tokens - sequence.turns[index].turn.num_tokens


def _latest_continuation(
    sequence: TrajectorySequence, index: int, sequences: Sequence[TrajectorySequence]
) -> int:
    """Return the number of the latest turn whose history begins with the history and the tokens of this turn, or NEVER.

    Args:
        sequence: The sequence that contains the turn.
        index: Index of the turn in the sequence.
        sequences: All sequences of the trajectory.
    """
    number = sequence.turns[index].turn.number
    latest = NEVER
    if index + 1 < len(sequence.turns):
        latest = sequence.turns[-1].turn.number
    token_ids = sequence.token_ids[: sequence.ends[index].num_tokens]
    for candidate in sequences:
        is_later = candidate.turns[0].turn.number > number
        has_images = _begins_with_images(candidate, sequence.history_images(index))
        history = candidate.token_ids[: _history_tokens(candidate, 0)]
        if is_later and has_images and np.array_equal(history[: len(token_ids)], token_ids):
            latest = max(latest, candidate.turns[-1].turn.number)
    return latest


def _begins_with_images(sequence: TrajectorySequence, images: tuple[ImageReference, ...]) -> bool:
    """Return whether the first history of a sequence begins with these images."""
    return sequence.history_images(0)[: len(images)] == images


def without_turns(
    sequences: Sequence[TrajectorySequence], numbers: Collection[int]
) -> list[TrajectorySequence]:
    """Return the sequences without their abandoned turns.

    An abandoned turn A is the last one of its sequence, because nothing continued it. The turn B that the agent used
    instead began another sequence. Here, A is removed, and B and the turns after it are appended in its place. So the
    trajectory has as many sequences as if A had never been sampled.

    Args:
        sequences: The sequences of the trajectory, which stay unchanged.
        numbers: Numbers of the abandoned turns.
    """
    results: list[TrajectorySequence] = []
    open_ends: list[TrajectorySequence] = []  # sequences whose last turn was removed
    for sequence in sorted(sequences, key=lambda sequence: sequence.turns[0].turn.number):
        shortened = _shortened(sequence, numbers)
        if shortened is None:
            continue
        earlier = _longest_history(shortened, open_ends)
        if earlier is None:
            results.append(shortened)
        else:
            open_ends.remove(earlier)
            _append(earlier, shortened)
        if len(shortened.turns) < len(sequence.turns):
            open_ends.append(shortened if earlier is None else earlier)
    return results


def _shortened(sequence: TrajectorySequence, numbers: Collection[int]) -> TrajectorySequence | None:
    """Return a copy of a sequence without the abandoned turn at its end; None if no turn is left."""
    num_turns = len(sequence.turns)
    if sequence.turns[-1].turn.number in numbers:
        num_turns -= 1
    if not num_turns:
        return None
    end = sequence.ends[num_turns - 1]
    return replace(
        sequence,
        token_ids=sequence.token_ids[: end.num_tokens],
        text=sequence.text[: end.num_characters],
        images=sequence.images[: end.num_images],
        turns=sequence.turns[:num_turns],
        ends=sequence.ends[:num_turns],
    )


def _longest_history(
    sequence: TrajectorySequence, candidates: Sequence[TrajectorySequence]
) -> TrajectorySequence | None:
    """Return the longest candidate whose tokens and text are the beginning of the sequence's first history, or None."""
    history = sequence.token_ids[: _history_tokens(sequence, 0)]
    matches = []
    for candidate in candidates:
        is_beginning = np.array_equal(history[: len(candidate.token_ids)], candidate.token_ids)
        has_images = _begins_with_images(sequence, candidate.images)
        if is_beginning and has_images and sequence.text.startswith(candidate.text):
            matches.append(candidate)
    return max(matches, key=lambda candidate: len(candidate.token_ids), default=None)


def _append(earlier: TrajectorySequence, later: TrajectorySequence) -> None:
    """Append the turns of `later` to `earlier`. The history of the first turn of `later` must begin with `earlier`."""
    first = later.turns[0]
    turn = replace(
        first.turn,
        before=first.turn.before[len(earlier.token_ids) :],
        before_text=first.turn.before_text[len(earlier.text) :],
        fresh=False,
        images=first.turn.images[len(earlier.images) :],
    )
    earlier.turns += [RecordedTurn(turn, first.completion), *later.turns[1:]]
    earlier.ends += later.ends
    earlier.token_ids = later.token_ids
    earlier.text = later.text
    earlier.images = later.images


def abandoned_turns(sequences: Sequence[TrajectorySequence], numbers: Collection[int]) -> tuple[Turn, ...]:
    """Return the abandoned turns in the order of time, with their texts, and without the tokens before them.

    Args:
        sequences: The sequences of the trajectory.
        numbers: Numbers of the abandoned turns (`abandoned_numbers`).
    """
    turns = []
    for sequence in sequences:
        for recorded in sequence.turns:
            if recorded.turn.number in numbers:
                turns.append(replace(recorded.turn, before=NO_TOKEN_IDS))
    return tuple(sorted(turns, key=lambda turn: turn.number))
