"""Trajectories with rewritten history: their sequences lie in different micro-batches, possibly on different ranks.

A critic's advantages go along a trajectory in time: what a later sequence earns must reach the tokens of the earlier ones,
and the last token before a change of the sequence is followed by the value of the first token after it. So the
rewards and values of these trajectories, and of no others, are brought together on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_grpo.training.distributed import Ranks
from async_grpo.training.objective import BatchTensors


@dataclass(frozen=True)
class Part:
    """Where the tokens of one row stand in `JoinedTrajectories.columns`."""

    row: BatchTensors
    tokens: Tensor  # (n,) int64, their places in the row
    places: Tensor  # (n,) int64, their places in the columns


@dataclass(frozen=True)
class JoinedTrajectories:
    """All trajectories of several sequences of a step, end to end, each in time."""

    parts: list[Part]  # of this rank
    lengths: list[int]  # tokens of each trajectory
    columns: Tensor  # (3, M) float64 on the CPU: rewards, values, and 1 where a token is trained on

    def estimate(self, critic_returns: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        """Write advantages and returns into the rows, in place of those of each sequence by itself."""
        rewards, values, trained = (
            pad_sequence(list(column.split(self.lengths)), batch_first=True) for column in self.columns
        )
        inside = pad_sequence(
            [torch.ones(length, dtype=torch.bool) for length in self.lengths], batch_first=True
        )
        advantages, returns = critic_returns(rewards, values, trained.bool())
        for part in self.parts:
            row = part.row
            assert row.returns is not None
            row.advantages[0, part.tokens] = advantages[inside][part.places].to(row.advantages)
            row.returns[0, part.tokens] = returns[inside][part.places].to(row.returns)


def joined_trajectories(rows: Sequence[BatchTensors], ranks: Ranks) -> JoinedTrajectories | None:
    """Bring together what the ranks hold of trajectories of several sequences; None: no rank holds any. A collective.

    The rows' `advantages` are still rewards, and their `old_values` are known.
    """
    pieces = [_piece(row) for row in rows if row.times is not None]
    (most,) = ranks.max([float(sum(len(piece.times) for piece in pieces))])
    if not most:
        return None
    names, lengths = _known_trajectories(pieces, ranks)
    begins = lengths.cumsum(0) - lengths
    columns = torch.zeros(3, int(lengths.sum()), dtype=torch.float64)
    parts = []
    for piece in pieces:
        row = piece.row
        assert row.old_values is not None
        trajectories = (piece.names[:, None] == names).all(dim=2).int().argmax(dim=1)
        part = Part(row, piece.tokens, begins[trajectories[piece.sequences]] + piece.times)
        sources = torch.stack([row.advantages[0], row.old_values[0], row.mask[0].to(row.advantages)])
        columns[:, part.places] = sources[:, part.tokens].double().cpu()
        parts.append(part)
    summed, _ = ranks.sum_and_max(columns.flatten(), [])
    return JoinedTrajectories(parts, lengths.tolist(), summed.view_as(columns))


@dataclass(frozen=True)
class _Piece:
    """The n tokens, in s sequences, of one row that belong to trajectories of several sequences; on the CPU."""

    row: BatchTensors
    tokens: Tensor  # (n,) int64, their places in the row
    names: Tensor  # (s, 2) int64, group and member of each of the sequences
    sequences: Tensor  # (n,) int64, which of them each token is of
    times: Tensor  # (n,) int64, their places in the trajectory


def _piece(row: BatchTensors) -> _Piece:
    assert row.times is not None and row.members is not None
    times = row.times[0].cpu().long()
    tokens = (times >= 0).nonzero().flatten()
    token_names = torch.stack([row.group_ids[0].cpu()[tokens], row.members[0].cpu()[tokens]], dim=1)
    names, sequences = torch.unique_consecutive(token_names, dim=0, return_inverse=True)
    return _Piece(row, tokens, names, sequences, times[tokens])


def _known_trajectories(pieces: Sequence[_Piece], ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the names (trajectories, 2) and lengths in tokens (trajectories,) of all ranks' trajectories, sorted."""
    parts = [torch.zeros(0, 3, dtype=torch.int64)]
    for piece in pieces:
        ends = torch.zeros(len(piece.names), dtype=torch.int64)
        ends = ends.scatter_reduce(0, piece.sequences, piece.times + 1, "amax")
        parts.append(torch.cat([piece.names, ends[:, None]], dim=1))
    own = torch.cat(parts)
    names, lengths = _lengths(own[:, :2], own[:, 2])
    # Ranks know different numbers of trajectories; lines of no length fill up the tables
    (most,) = ranks.max([float(len(names))])
    table = torch.zeros(int(most), 3, dtype=torch.float64)
    table[: len(names)] = torch.cat([names, lengths[:, None]], dim=1)
    merged = ranks.gathered(table).flatten(end_dim=1).long()
    merged = merged[merged[:, 2] > 0]
    return _lengths(merged[:, :2], merged[:, 2])


def _lengths(names: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return each distinct name with its length: its largest `times` + 1."""
    distinct, numbers = torch.unique(names, dim=0, return_inverse=True)
    return distinct, torch.zeros(len(distinct), dtype=torch.int64).scatter_reduce(0, numbers, ends, "amax")
