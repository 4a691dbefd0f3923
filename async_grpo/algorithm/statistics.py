"""What estimators share: sums over groups, a pool made zero-mean and unit-variance, discounted sums.

Rows are samples: a quantity per sample is (B, 1), one per token (B, T); everything is float64. Means are taken after the
pool's lowest value is subtracted, so that a pool of equal values gives exact zeros. (The mean of seven times 0.1 is
not 0.1; that noise, divided by as small a deviation, would be a full-sized advantage.)
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

WHITENING_EPS = 1e-8  # added to the variance
SMALLEST_EXPONENT = -900  # of a scale: an eps divided by it is still finite


@dataclass(frozen=True)
class Groups:
    """Which rows are compared with which.

    A participant is a candidate (a row that could teach: valid, with an unmasked token) with another one in its group.
    """

    index: Tensor  # (B,) 0 ... number - 1
    number: int
    participates: Tensor  # (B, 1) bool

    @classmethod
    def of(cls, group_ids: Tensor, candidates: Tensor) -> "Groups":
        """From any integer id per row (B,) and the rows that could teach (B,)."""
        distinct, index = torch.unique(group_ids, return_inverse=True)
        sizes = torch.bincount(index[candidates], minlength=len(distinct))
        return cls(index, len(distinct), (candidates & (sizes[index] >= 2))[:, None])

    def total(self, values: Tensor) -> Tensor:
        """The sum of (B, K) values over each row's group, (B, 1); they must be zero where they do not count."""
        sums = torch.zeros(self.number, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self.index, values.double().sum(dim=1))[self.index, None]

    def lowest(self, values: Tensor, counted: Tensor) -> Tensor:
        """The least of the counted (B, K) values of each row's group, (B, 1); inf where none counts."""
        rows = torch.where(counted, values, torch.inf).amin(dim=1)
        least = rows.new_full((self.number,), torch.inf).scatter_reduce(0, self.index, rows, "amin")
        return least[self.index, None]

    def above_lowest(self, values: Tensor, counted: Tensor) -> Tensor:
        """Counted values (B, K) minus the least of their group; zero where not counted."""
        return torch.where(counted, values - self.lowest(values, counted), 0)

    def centred(self, values: Tensor, counted: Tensor, weights: Tensor | None = None) -> Tensor:
        """Counted values (B, K) minus their group's mean, weighted by `weights` (B, 1); zero where not counted."""
        above = self.above_lowest(values, counted)
        shares = counted.double() if weights is None else counted * weights
        mean = over(self.total(shares * above), self.total(shares))
        return torch.where(counted, above - mean, 0)

    def standardised(self, values: Tensor, counted: Tensor, eps: float) -> Tensor:
        """Return (value - mean) / (std + eps) over each group, std with ddof 1; zero where a group has fewer than two."""
        above = self.above_lowest(values, counted)
        scale = self.scale(above)
        centred = self.centred(above / scale, counted)
        return over(centred, self.deviation(centred, counted) + eps / scale)

    def deviation(self, centred: Tensor, counted: Tensor) -> Tensor:
        """Return the standard deviation (ddof 1) of each row's group, (B, 1), of values that are centred already."""
        scale = self.scale(centred)
        squares = self.total((centred / scale).square())
        return scale * (squares / (self.total(counted) - 1).clamp(min=1)).sqrt()

    def scale(self, values: Tensor) -> Tensor:
        """Return `power_of_two_near` the largest magnitude of each row's group, (B, 1); uncounted values must be zero."""
        return power_of_two_near(-self.lowest(-values.abs(), torch.ones_like(values, dtype=torch.bool)))


def power_of_two_near(largest: Tensor) -> Tensor:
    """Return a power of two near each magnitude, 1 for 0.

    Of values divided by it no square vanishes and no mean is rounded to the smallest number; the division itself rounds
    nothing.
    """
    exponent = torch.frexp(largest).exponent.clamp(min=SMALLEST_EXPONENT)
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1)


def over(values: Tensor, divisor: Tensor) -> Tensor:
    """Return values / divisor, and 0 where the divisor is 0: an empty group, or a deviation of zero without eps.

    A divisor that is not a number makes a quotient that is none: it must not pass for a zero.
    """
    return torch.where(divisor == 0, 0, values / divisor)


@torch.no_grad()
def whitening_moments(values: Tensor, used: Tensor) -> Tensor:
    """(count, mean, sum of squared deviations from it) of the used values (B, T), as a (3,) float64 tensor.

    used (B, T): bool, or how many tokens each value stands for.
    """
    chosen = used.bool()
    pool = values[chosen].double()  # each value is a pool of its own, without a deviation
    return merge_moments(torch.stack([used[chosen].double(), pool, torch.zeros_like(pool)], dim=1))


@torch.no_grad()
def merge_moments(moments: Tensor) -> Tensor:
    """The (3,) moments of the union of several pools, from theirs (R, 3): of a batch that is spread over R ranks.

    Chan, Golub and LeVeque 1983: the squared deviations, plus those of the pools' means: no digits are lost where the
    mean is large against the deviation.
    """
    moments = moments[moments[:, 0] > 0]  # an empty pool has no mean
    if not len(moments):
        return moments.new_zeros(3)
    counts, means, squares = moments.unbind(dim=1)
    lowest = means.min()
    mean = lowest + (counts * (means - lowest)).sum() / counts.sum()
    return torch.stack([counts.sum(), mean, (squares + counts * (means - mean).square()).sum()])


@torch.no_grad()
def whitened(values: Tensor, used: Tensor, moments: Tensor | None = None) -> Tensor:
    """(value - mean) / sqrt(variance + 1e-8) of the used values (B, T), in their dtype; zero where not used.

    used: as in `whitening_moments`. The variance has ddof 1. A pool of equal values, or of one, gives exact zeros. Unused
    values may be NaN. moments (3,): those of the whole pool (`merge_moments`), where the values are only a part of it.
    """
    count, mean, squares = (whitening_moments(values, used) if moments is None else moments).double()
    deviation = (squares / (count - 1).clamp(min=1) + WHITENING_EPS).sqrt()
    # Divided by an infinite deviation every value would be zero, as if there were nothing to learn
    deviation = torch.where(deviation.isinf(), torch.nan, deviation)
    return torch.where(used.bool(), (values.double() - mean) / deviation, 0).to(values.dtype)


def reverse_scan(terms: Tensor, decay: Tensor) -> Tensor:
    """x_t = terms_t + decay_t * x_{t+1} along the tokens (B, T), with x = 0 past the end.

    No division by a vanishing power of the decay. In blocks of about sqrt(T) tokens: all of them at once, each as if
    nothing followed it, then what follows each. That is 2 sqrt(T) operations over few tokens each.
    """
    (rows, width), size = terms.shape, max(math.isqrt(terms.shape[1]), 1)
    blocks = -(-width // size)
    sums, kept = (pad(x, (0, blocks * size - width)).view(rows, blocks, size) for x in (terms, decay))
    for t in reversed(range(size - 1)):
        sums[..., t].addcmul_(kept[..., t], sums[..., t + 1])
        kept[..., t] *= kept[..., t + 1]  # of all from here to the end of the block
    for block in reversed(range(blocks - 1)):
        sums[:, block].addcmul_(kept[:, block], sums[:, block + 1, :1])
    return sums.view(rows, -1)[:, :width]


def returns_to_go(rewards: Tensor, used: Tensor, gamma: float = 1.0) -> Tensor:
    """R_t = r_t + gamma * R of the next used token (B, T). Masked tokens are skipped: they neither pay nor discount.

    >>> rewards, used = torch.tensor([[1.0, 9.0, 4.0]]), torch.tensor([[True, False, True]])
    >>> returns_to_go(rewards.double(), used, gamma=0.5).tolist()  # what a masked token holds is of no use
    [[3.0, 4.0, 4.0]]
    """
    used = used.bool()
    paid = torch.where(used, rewards, 0)
    return paid.flip(1).cumsum(1).flip(1) if gamma == 1 else reverse_scan(paid, decay_on(used, gamma))


def decay_on(used: Tensor, decay: float) -> Tensor:
    """`decay` where used, 1 elsewhere, in float64; where(used, decay, 1.0) of two floats would be float32."""
    return used * torch.tensor(decay, dtype=torch.float64, device=used.device) + ~used
