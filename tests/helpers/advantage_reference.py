"""Random batches, and every estimator by its definition: plain Python loops over floats, nothing of the library.

A batch has groups of several sizes in shuffled order, lone samples, invalid rows, empty responses and holes in the
mask; whatever must not be read is garbage, NaN and inf included, when the batch becomes tensors.
"""

import math
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

import torch
from hypothesis import strategies as st

WEIGHTS = {"a": 0.5}  # of the two rewards a and b; b is not named
SCALARS = {
    "reinforce_plus_plus": {"gamma": 0.9},
    "gae": {"gamma": 0.95, "lam": 0.8},
    "decoupled_gae": {"gamma": 0.95, "lam": 0.8},
    "running_mean": {"decay": 0.75},
}
# Estimators that do not compare within groups: a sample may be the only one of its group
NO_GROUP = ("remax", "reinforce_plus_plus", "gae", "decoupled_gae", "flash_reinforce", "running_mean")
DYADIC = [0.0, 0.5, 1.0, -2.5, 0.125]  # their sums are exact in any order
DECIMAL = [0.0, 0.1, 0.3, 1.0, -2.5]


@dataclass
class Row:
    group: int
    valid: bool
    mask: list[bool]
    a: list[float]  # the reward of each token
    b: list[float]  # a second reward
    steps_a: list[bool]
    steps_b: list[bool]
    values: list[float]
    baseline: float

    @property
    def used(self):
        return [t for t, unmasked in enumerate(self.mask) if unmasked]


@st.composite
def batches(draw, max_rows=10, width=5):
    """Rows with a reward on each token, or with one on the last unmasked token."""
    random = Random(draw(st.integers(0, 2**32)))  # drawn one by one, forty numbers a row would take seconds
    on_last = draw(st.booleans())

    def flags():
        density = random.choice([0.3, 0.7, 1.0])
        return [random.random() < density for _ in range(width)]

    def number():
        return random.randint(-200, 200) / 64  # float32 holds it

    def reward(mask):
        if not on_last:
            return [random.choice(DYADIC) for _ in mask]
        last = max((t for t, unmasked in enumerate(mask) if unmasked), default=None)
        return [random.choice(DECIMAL) if t == last else 0.0 for t in range(width)]

    def row():
        mask = flags() if random.random() < 0.9 else [False] * width
        return Row(
            group=random.choice([-1, 0, 0, 5, 10**12]),
            valid=random.random() < 0.8,
            mask=mask,
            a=reward(mask),
            b=reward(mask),
            steps_a=flags(),
            steps_b=flags(),
            values=[number() for _ in range(width)],
            baseline=number(),
        )

    return [row() for _ in range(draw(st.integers(1, max_rows)))]


def call(estimators, name, rows, dtype=torch.float64, garbage=math.nan, **options):
    """The library's answer. Whatever must not be read holds `garbage`."""

    def stack(read, dtype=None):
        return torch.tensor([read(row) for row in rows], dtype=dtype)

    def tokens(name, counted="mask"):
        places = stack(
            lambda row: [row.valid and m and c for m, c in zip(row.mask, getattr(row, counted), strict=True)]
        )
        values = stack(lambda row: getattr(row, name), dtype)
        return torch.where(places, values, garbage).requires_grad_()

    rewards, inputs = tokens("a"), dict(SCALARS.get(name, {}))
    valid = stack(lambda row: row.valid)
    match name:
        case "remax":
            inputs["baselines"] = torch.where(valid, stack(lambda row: row.baseline, dtype), garbage)
        case "gae" | "decoupled_gae":
            inputs["values"] = tokens("values")
        case "running_mean":
            inputs["keys"] = stack(lambda row: row.group)
            inputs["means"] = stack(lambda row: mean_before(row.group), torch.float64)
        case "gdpo":
            rewards, inputs["weights"] = {"a": rewards, "b": tokens("b")}, WEIGHTS
        case "grpo_process":
            rewards, inputs["step_mask"] = tokens("a", "steps_a"), stack(lambda row: row.steps_a)
        case "prime_rloo":
            rewards = {"a": tokens("a", "steps_a"), "b": tokens("b", "steps_b")}
            masks = {"a": stack(lambda row: row.steps_a), "b": stack(lambda row: row.steps_b)}
            inputs |= {"weights": WEIGHTS, "masks": masks}
    mask, groups = stack(lambda row: row.mask), stack(lambda row: row.group)
    return estimators[name](rewards, mask, groups, valid=valid, **{**inputs, **options})


def mean_before(key):
    """The running mean of a key before the batch."""
    return (key % 7) / 4


def participants(rows, name):
    teaches = [row.valid and any(row.mask) for row in rows]
    if name in NO_GROUP:
        return teaches
    return [
        teaches[i] and sum(teaches[j] for j, other in enumerate(rows) if other.group == row.group) >= 2
        for i, row in enumerate(rows)
    ]


def definition(name, rows, **options):
    """Advantages of every token of every row, by the formula."""
    advantages = [[0.0] * len(row.mask) for row in rows]
    taking_part = [i for i, takes_part in enumerate(participants(rows, name)) if takes_part]
    members, where = [rows[i] for i in taking_part], [(i, t) for i in taking_part for t in rows[i].used]
    for i, t in where:
        peers = [member for member in members if member.group == rows[i].group]
        advantages[i][t] = FORMULAS[name](rows[i], t, peers, members, **SCALARS.get(name, {}), **options)
    if name in WHITENED:
        for (i, t), value in zip(where, whiten([advantages[i][t] for i, t in where]), strict=True):
            advantages[i][t] = value
    return advantages


def whiten(pool):
    mean, variance = moments(pool)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in pool]


def moments(pool):
    """Mean and variance (ddof 1; zero for fewer than two)."""
    mean = fmean(pool) if pool else 0.0
    return mean, math.fsum((x - mean) ** 2 for x in pool) / (len(pool) - 1) if len(pool) > 1 else 0.0


def score(row, which="a"):
    return math.fsum(getattr(row, which)[t] for t in row.used)


def scores(rows, which="a"):
    return [score(row, which) for row in rows]


def grpo(row, t, peers, members, which="a"):
    mean, variance = moments(scores(peers, which))
    if len(set(scores(peers, which))) == 1:
        return 0.0
    return (score(row, which) - mean) / (math.sqrt(variance) + 1e-6)


def dr_grpo(row, t, peers, members):
    return score(row) - fmean(scores(peers))


def rloo(row, t, peers, members):
    return score(row) - fmean(score(other) for other in peers if other is not row)


def opo(row, t, peers, members):
    lengths = [len(peer.used) for peer in peers]
    weighted = math.fsum(n * s for n, s in zip(lengths, scores(peers), strict=True))
    return score(row) - weighted / sum(lengths)


def gpg(row, t, peers, members):
    return dr_grpo(row, t, peers, members) * len(members) / max(1, sum(s != 0 for s in scores(members)))


def max_rl(row, t, peers, members):
    mean = fmean(scores(peers))
    if mean <= 1e-6 * max(map(abs, scores(peers))):
        return 0.0
    return (score(row) - mean) / mean


def grpo_passk(row, t, peers, members, normalize=True):
    second, first = sorted(scores(peers))[-2:]
    if score(row) != first or first == second:
        return 0.0
    return (first - second) / (math.sqrt(moments(scores(peers))[1]) + 1e-6 if normalize else 1.0)


def grpo_batch_std(row, t, peers, members, centred=True):
    above = [
        s - fmean(scores([p for p in members if p.group == m.group]))
        for m, s in zip(members, scores(members), strict=True)
    ]
    deviation = math.sqrt(moments(above if centred else scores(members))[1])
    if min(scores(peers)) == max(scores(peers)):
        return 0.0
    return dr_grpo(row, t, peers, members) / (deviation + 1e-6)


def reinforce_plus_plus(row, t, peers, members, gamma):
    return math.fsum(gamma**k * row.a[u] for k, u in enumerate(u for u in row.used if u >= t))


def remax(row, t, peers, members):
    return reinforce_plus_plus(row, t, peers, members, gamma=1.0) - row.baseline


def gdpo(row, t, peers, members):
    return 0.5 * grpo(row, t, peers, members, "a") + grpo(row, t, peers, members, "b")


def gae(row, t, peers, members, gamma, lam):
    later = [u for u in row.used if u >= t]
    worth = [row.values[u] for u in later] + [0.0]
    deltas = [row.a[u] + gamma * worth[k + 1] - worth[k] for k, u in enumerate(later)]
    return math.fsum((gamma * lam) ** k * delta for k, delta in enumerate(deltas))


def decoupled_gae(row, t, peers, members, gamma, lam, alpha=0):
    if alpha:
        lam = max(0, 1 - 1 / (alpha * len(row.used)))
    return gae(row, t, peers, members, gamma, lam)


def flash_reinforce(row, t, peers, members):
    return score(row) - fmean(scores(members))


def running_mean(row, t, peers, members, decay):
    mean = mean_before(row.group)
    for peer in peers:
        if peer is row:
            return score(row) - mean
        mean = decay * mean + (1 - decay) * score(peer)
    raise AssertionError("the row is one of its peers")


def grpo_process(row, t, peers, members):
    pool = [peer.a[u] for peer in peers for u in peer.used if peer.steps_a[u]]
    if len(pool) < 2 or min(pool) == max(pool):
        return 0.0
    mean, variance = moments(pool)
    later = [row.a[u] for u in row.used if u >= t and row.steps_a[u]]
    return math.fsum((reward - mean) / (math.sqrt(variance) + 1e-6) for reward in later)


def prime_rloo(row, t, peers, members):
    total = 0.0
    for weight, which in ((0.5, "a"), (1.0, "b")):
        places = {id(p): [u for u in p.used if getattr(p, f"steps_{which}")[u]] for p in peers}
        means = [fmean(getattr(p, which)[u] for u in places[id(p)]) for p in peers if places[id(p)]]
        n = len(means)
        if n >= 2:
            later = [getattr(row, which)[u] for u in places[id(row)] if u >= t]
            total += weight * math.fsum(r * n / (n - 1) - sum(means) / (n - 1) for r in later)
    return total


OUTCOME = (grpo, dr_grpo, rloo, opo, max_rl, gpg, grpo_passk, grpo_batch_std, flash_reinforce, running_mean)
OTHERS = (reinforce_plus_plus, remax, gdpo, gae, decoupled_gae, grpo_process, prime_rloo)
FORMULAS = {formula.__name__: formula for formula in OUTCOME + OTHERS}
FORMULAS["reinforce_plus_plus_baseline"] = dr_grpo
NAMES = tuple(FORMULAS)
WHITENED = {
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "prime_rloo",
    "gae",
    "decoupled_gae",
}


def with_equal_rewards(rows, reward):
    """The same batch with that reward on the last unmasked token of every row, and no holes among the steps."""
    changed = []
    for row in rows:
        last = [bool(row.used) and t == row.used[-1] for t in range(len(row.mask))]
        rewards = [reward if on_last else 0.0 for on_last in last]
        changed.append(replace(row, a=rewards, b=rewards, steps_a=last, steps_b=last))
    return changed
