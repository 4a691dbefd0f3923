"""Statistics that estimators share: sums over groups, standardised and whitened values, discounted sums.

Rows are samples: a value per sample is (B, 1), a value per token (B, T). All are float64. Before a mean is computed,
the lowest value is subtracted from all values, so that equal values have exact zeros as differences from their mean.
(The computed mean of seven times 0.1 is not exactly 0.1. The difference is rounding noise, but divided by an equally
small deviation it would become a full-sized advantage.)
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64, Shaped
from torch import Tensor
from torch.nn.functional import pad

WHITENING_EPS = 1e-8  # added to the variance before the square root
# Values and eps are divided by a power of two with at least this exponent. eps / 2**-900 is still finite
SMALLEST_EXPONENT = -900


@dataclass(frozen=True)
class Groups:
    """The groups of rows that are compared with each other.

    A candidate is a valid row with an unmasked token. A participant is a candidate whose group is large enough: usually
    it must have another candidate.
    """

    index: Int64[Tensor, " batch"]  # group of each row, 0 ... number - 1
    number: int  # number of groups
    participates: Bool[Tensor, "batch 1"]  # True for the rows that are participants

    @classmethod
    def of(
        cls, group_ids: Int[Tensor, " batch"], candidates: Bool[Tensor, " batch"], min_size: int = 2
    ) -> "Groups":
        """Return the groups of the rows.

        Args:
            group_ids: Any integers, equal within a group.
            candidates: The rows that may participate.
            min_size: The candidates of a group participate if there are at least this many.
        """
        distinct, index = torch.unique(group_ids, return_inverse=True)
        sizes = torch.bincount(index[candidates], minlength=len(distinct))
        participates = candidates & (sizes[index] >= min_size)
        return cls(index, len(distinct), participates[:, None])

    def joined(self) -> "Groups":
        """Return all rows as a single group, with the same participants."""
        return Groups(torch.zeros_like(self.index), 1, self.participates)

    def total(self, values: Shaped[Tensor, "batch columns"]) -> Float64[Tensor, "batch 1"]:
        """Return, for each row, the sum of the values over its group. Values that do not count must be zero."""
        sums = torch.zeros(self.number, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self.index, values.double().sum(dim=1))[self.index, None]

    def lowest(
        self, values: Float64[Tensor, "batch columns"], counted: Shaped[Tensor, "batch columns"]
    ) -> Float64[Tensor, "batch 1"]:
        """Return, for each row, the lowest counted value of its group, or inf if the group has none."""
        lowest_of_rows = torch.where(counted, values, torch.inf).amin(dim=1)
        lowest = lowest_of_rows.new_full((self.number,), torch.inf)
        lowest = lowest.scatter_reduce(0, self.index, lowest_of_rows, "amin")
        return lowest[self.index, None]

    def above_lowest(
        self, values: Float64[Tensor, "batch columns"], counted: Shaped[Tensor, "batch columns"]
    ) -> Float64[Tensor, "batch columns"]:
        """Return the counted values minus the lowest counted value of their group. Other values become 0."""
        return torch.where(counted, values - self.lowest(values, counted), 0)

    def centred(
        self,
        values: Float64[Tensor, "batch columns"],
        counted: Shaped[Tensor, "batch columns"],
        weights: Float64[Tensor, "batch 1"] | None = None,
    ) -> Float64[Tensor, "batch columns"]:
        """Return the counted values minus the (weighted) mean of their group. Values that do not count become 0."""
        above = self.above_lowest(values, counted)
        shares = counted.double() if weights is None else counted * weights
        mean = divide_or_zero(self.total(shares * above), self.total(shares))
        return torch.where(counted, above - mean, 0)

    def standardised(
        self, values: Float64[Tensor, "batch columns"], counted: Shaped[Tensor, "batch columns"], eps: float
    ) -> Float64[Tensor, "batch columns"]:
        """Return (value - mean) / (std + eps) with the mean and the std (ddof 1) of the counted values of each group.

        A group with fewer than two counted values gets zeros.
        """
        above = self.above_lowest(values, counted)
        scale = self.scale(above)
        centred = self.centred(above / scale, counted)
        return divide_or_zero(centred, self.deviation(centred, counted) + eps / scale)

    def deviation(
        self, centred: Float64[Tensor, "batch columns"], counted: Shaped[Tensor, "batch columns"]
    ) -> Float64[Tensor, "batch 1"]:
        """Return, for each row, the standard deviation (ddof 1) of its group, from values whose mean is already 0."""
        scale = self.scale(centred)
        squares = self.total((centred / scale).square())
        return scale * (squares / (self.total(counted) - 1).clamp(min=1)).sqrt()

    def scale(self, values: Float64[Tensor, "batch columns"]) -> Float64[Tensor, "batch 1"]:
        """Return, for each row, a power of two near the largest |value| of its group. Uncounted values must be 0."""
        full_mask = torch.ones_like(values, dtype=torch.bool)
        largest = -self.lowest(-values.abs(), full_mask)
        return power_of_two_near(largest)


def power_of_two_near(largest: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return a power of two near each magnitude, and 1 for a magnitude of 0.

    Values that are divided by it can be squared without an underflow to 0. Dividing by a power of two is exact.
    """
    exponent = torch.frexp(largest).exponent.clamp(min=SMALLEST_EXPONENT)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1)


def divide_or_zero(
    values: Float[Tensor, "batch columns"], divisor: Float[Tensor, " batch #columns"]
) -> Float[Tensor, "batch columns"]:
    """Return values / divisor, and 0 where the divisor is 0.

    The divisor is 0 for an empty group, or for a deviation of 0 with eps = 0. A NaN divisor gives NaN, so that the
    error is noticed.
    """
    return torch.where(divisor == 0, 0, values / divisor)


@torch.no_grad()
def whitening_moments(
    values: Float[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"]
) -> Float64[Tensor, "3"]:
    """Return (count, mean, sum of squared deviations from the mean) of the used values.

    Args:
        values: The values. Those that are not used may be NaN.
        used: Bool, or the number of tokens that each value stands for.
    """
    is_used = used.bool()
    counts = used[is_used].double()
    # Treat each value as a separate pool, whose mean is the value and whose squared deviation is 0
    means = values[is_used].double()
    return merge_moments(torch.stack([counts, means, torch.zeros_like(means)], dim=1))


@torch.no_grad()
def merge_moments(moments: Float64[Tensor, "pools 3"]) -> Float64[Tensor, "3"]:
    """Return the `whitening_moments` of the union of several pools of values, from those of each pool.

    A pool is, for example, one rank's part of a batch. The squared deviations within the pools are added to the squared
    deviations of the pools' means (Chan, Golub and LeVeque 1983). Unlike a difference of mean squares, this sum loses
    no digits if the mean is large compared with the deviation.
    """
    moments = moments[moments[:, 0] > 0]  # an empty pool has no mean
    if not len(moments):
        return moments.new_zeros(3)
    counts, means, squares = moments.unbind(dim=1)
    lowest = means.min()
    mean = lowest + (counts * (means - lowest)).sum() / counts.sum()
    sum_of_squares = (squares + counts * (means - mean).square()).sum()
    return torch.stack([counts.sum(), mean, sum_of_squares])


@torch.no_grad()
def whitened(
    values: Float[Tensor, "batch tokens"],
    used: Shaped[Tensor, "batch tokens"],
    moments: Float64[Tensor, "3"] | None = None,
) -> Float[Tensor, "batch tokens"]:
    """Return (value - mean) / sqrt(variance + 1e-8) of the used values, in their dtype, and 0 elsewhere.

    The variance has ddof 1. Equal values, or a single value, give exact zeros.

    Args:
        values: The values. Those that are not used may be NaN.
        used: Bool, or the number of tokens that each value stands for.
        moments: The moments of the whole batch (`merge_moments`), if the values are only a part of it.
    """
    if moments is None:
        moments = whitening_moments(values, used)
    count, mean, squares = moments.double()
    deviation = (squares / (count - 1).clamp(min=1) + WHITENING_EPS).sqrt()
    # Division by an infinite deviation would give zeros, as if all rewards were equal. NaN shows the overflow
    deviation = torch.where(deviation.isinf(), torch.nan, deviation)
    return torch.where(used.bool(), (values.double() - mean) / deviation, 0).to(values.dtype)


def reverse_scan(
    terms: Float[Tensor, "batch tokens"], decay: Float[Tensor, "batch tokens"]
) -> Float[Tensor, "batch tokens"]:
    """Return x_t = terms_t + decay_t * x_{t+1} along the tokens, with x = 0 past the end.

    The tokens are split into blocks of about sqrt(T) tokens. First, all blocks are scanned in parallel, as if no other
    block followed. Then each block, from the last to the first, is corrected for the tokens after it. This takes about
    2 sqrt(T) tensor operations, and does not divide by powers of the decay, which might underflow.
    """
    num_rows, num_tokens = terms.shape
    block_size = max(math.isqrt(num_tokens), 1)
    num_blocks = -(-num_tokens // block_size)
    padding = (0, num_blocks * block_size - num_tokens)
    sums = pad(terms, padding).view(num_rows, num_blocks, block_size)
    decays = pad(decay, padding).view(num_rows, num_blocks, block_size)
    for t in reversed(range(block_size - 1)):
        sums[..., t].addcmul_(decays[..., t], sums[..., t + 1])
        decays[..., t] *= decays[..., t + 1]  # now the product of the decays from t to the end of the block
    for block in reversed(range(num_blocks - 1)):
        sums[:, block].addcmul_(decays[:, block], sums[:, block + 1, :1])
    return sums.view(num_rows, -1)[:, :num_tokens]


def returns_to_go(
    rewards: Float[Tensor, "batch tokens"], used: Shaped[Tensor, "batch tokens"], gamma: float = 1.0
) -> Float[Tensor, "batch tokens"]:
    """Return R_t = r_t + gamma * (R of the next used token). Masked tokens add no reward and no discount.

    >>> rewards, used = torch.tensor([[1.0, 9.0, 4.0]]), torch.tensor([[True, False, True]])
    >>> returns_to_go(rewards.double(), used, gamma=0.5).tolist()  # the value of a masked token is meaningless
    [[3.0, 4.0, 4.0]]
    """
    used = used.bool()
    rewards = torch.where(used, rewards, 0)
    if gamma == 1:
        return rewards.flip(1).cumsum(1).flip(1)
    return reverse_scan(rewards, decay_on(used, gamma))


def decay_on(
    used: Bool[Tensor, "batch tokens"], decay: float | Float64[Tensor, "batch 1"]
) -> Float64[Tensor, "batch tokens"]:
    """Return the decay, one number or one for each row, at used tokens and 1 elsewhere, as float64."""
    # torch.where(used, decay, 1.0) with two Python floats would return float32
    return used * torch.as_tensor(decay, dtype=torch.float64, device=used.device) + ~used
