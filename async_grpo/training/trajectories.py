"""Compute advantages of trajectories with several sequences, which may be in different micro-batches and ranks.

A trajectory has several sequences if its history was rewritten. Advantages with a critic are computed along the
trajectory in time: a reward in a later sequence must reach the tokens of earlier sequences, and the last token of a
sequence needs the value of the first token of the next sequence. So the rewards and values of these trajectories are
gathered on every rank. Trajectories of one sequence do not need this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.distributed import Ranks


@dataclass(frozen=True)
class Part:
    """The tokens of one row that belong to `JoinedTrajectories`, and their indices in `columns`."""

    row: BatchTensors
    tokens: Int64[Tensor, " tokens"]  # indices of the tokens in the row
    places: Int64[Tensor, " tokens"]  # indices of the same tokens in `JoinedTrajectories.columns`


@dataclass(frozen=True)
class JoinedTrajectories:
    """The trajectories of a step that have several sequences, one after the other.

    The tokens of each trajectory are in the order of time.
    """

    parts: list[Part]  # the tokens of this rank, one `Part` for each row that has any
    lengths: list[int]  # number of tokens of each trajectory
    # Three rows, for the tokens of all ranks: rewards; values; 1 if the token is trained on, else 0. On the CPU
    columns: Float64[Tensor, "3 packed"]

    def estimate(
        self,
        critic_returns: Callable[
            [Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]],
            tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]],
        ],
    ) -> None:
        """Write advantages and returns along whole trajectories into the rows.

        These replace the advantages and returns that were computed for each sequence alone.
        """
        rewards, values, is_trained = (self._by_trajectory(column) for column in self.columns)
        is_token = self._by_trajectory(torch.ones(sum(self.lengths), dtype=torch.bool))  # False at padding
        advantages, returns = critic_returns(rewards, values, is_trained.bool())
        for part in self.parts:
            row = part.row
            assert row.returns is not None
            row.advantages[0, part.tokens] = advantages[is_token][part.places].to(row.advantages)
            row.returns[0, part.tokens] = returns[is_token][part.places].to(row.returns)

    def _by_trajectory(self, column: Shaped[Tensor, " packed"]) -> Shaped[Tensor, "trajectories tokens"]:
        """Split one value per token, such as a row of `columns`, into a padded table with one row for each trajectory."""
        return pad_sequence(list(column.split(self.lengths)), batch_first=True)


def joined_trajectories(rows: Sequence[BatchTensors], ranks: Ranks) -> JoinedTrajectories | None:
    """Return the trajectories of all ranks that have several sequences, or None if there are none. A collective.

    Call it while `advantages` of the rows still contains rewards, and after `old_values` is set.
    """
    pieces = [_piece(row) for row in rows if row.times is not None]
    num_tokens = sum(len(piece.times) for piece in pieces)
    (most_tokens,) = ranks.max([float(num_tokens)])
    if not most_tokens:
        return None
    names, lengths = _all_trajectories(pieces, ranks)
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
    """The tokens of one row that belong to trajectories with several sequences. Its tensors are on the CPU."""

    row: BatchTensors
    tokens: Int64[Tensor, " tokens"]  # indices of the tokens in the row
    names: Int64[Tensor, "sequences 2"]  # (group, member) of each sequence, which identifies its trajectory
    sequences: Int64[Tensor, " tokens"]  # index of each token's sequence in `names`
    times: Int64[Tensor, " tokens"]  # index of each token in its trajectory, in the order of time


def _piece(row: BatchTensors) -> _Piece:
    """Return the tokens of a row that belong to trajectories with several sequences."""
    assert row.times is not None and row.members is not None
    times = row.times[0].cpu().long()
    tokens = (times >= 0).nonzero().flatten()
    token_names = torch.stack([row.group_ids[0].cpu()[tokens], row.members[0].cpu()[tokens]], dim=1)
    names, sequences = torch.unique_consecutive(token_names, dim=0, return_inverse=True)
    return _Piece(row, tokens, names, sequences, times[tokens])


def _all_trajectories(
    pieces: Sequence[_Piece], ranks: Ranks
) -> tuple[Int64[Tensor, "trajectories 2"], Int64[Tensor, " trajectories"]]:
    """Return the (group, member) and the number of tokens of each trajectory of all ranks, sorted."""
    parts = [torch.zeros(0, 3, dtype=torch.int64)]
    for piece in pieces:
        ends = torch.zeros(len(piece.names), dtype=torch.int64)
        ends = ends.scatter_reduce(0, piece.sequences, piece.times + 1, "amax")
        parts.append(torch.cat([piece.names, ends[:, None]], dim=1))
    names_and_ends = torch.cat(parts)
    names, lengths = _lengths(names_and_ends[:, :2], names_and_ends[:, 2])
    # Ranks hold different numbers of trajectories, but `gathered` needs equal shapes: pad with trajectories of length 0
    (num_rows,) = ranks.max([float(len(names))])
    table = torch.zeros(int(num_rows), 3, dtype=torch.float64)
    table[: len(names)] = torch.cat([names, lengths[:, None]], dim=1)
    merged = ranks.gathered(table).flatten(end_dim=1).long()
    merged = merged[merged[:, 2] > 0]
    return _lengths(merged[:, :2], merged[:, 2])


def _lengths(
    names: Int64[Tensor, "entries 2"], ends: Int64[Tensor, " entries"]
) -> tuple[Int64[Tensor, "trajectories 2"], Int64[Tensor, " trajectories"]]:
    """Return the distinct (group, member) pairs, and the length of each trajectory, its largest entry in `ends`."""
    distinct_names, indices = torch.unique(names, dim=0, return_inverse=True)
    lengths = torch.zeros(len(distinct_names), dtype=torch.int64)
    return distinct_names, lengths.scatter_reduce(0, indices, ends, "amax")
