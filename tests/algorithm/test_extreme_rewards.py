"""Every estimator at any size of its rewards: right, by its definition in 800 digits, or refused by name.

Never an infinite advantage, nor NaN, nor zeros where something differs.
"""

import math
import random
from types import SimpleNamespace

import advantage_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.estimator_inputs import LARGEST

DIGITS = 800  # squares of 1e-320 beside an epsilon
NAMES = sorted(set(ADVANTAGE_ESTIMATORS) - {"teacher"})  # which reads no reward
GAMMA, OMEGA = 0.95, 1.0  # of gigpo
LARGEST_OF = {torch.float32: torch.finfo(torch.float32).max, torch.float64: torch.finfo(torch.float64).max}
# Beside the rounding of each step: of float32, the deviation's 1e-8 and the inputs are exact
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}
SMALLEST = {torch.float32: 1e-37, torch.float64: 1e-300}


@pytest.fixture(autouse=True)
def in_many_digits(monkeypatch):
    """Have the definitions compute in mpmath."""
    monkeypatch.setattr(mp, "dps", DIGITS)
    monkeypatch.setattr(reference, "math", SimpleNamespace(fsum=mp.fsum, sqrt=mp.sqrt))
    monkeypatch.setattr(reference, "fmean", mean)


def mean(values):
    numbers = list(values)
    return mp.fsum(numbers) / len(numbers)


def batch(seed: int, exponent: int) -> list[reference.Row]:
    """Return two groups of two or three rows of one to three tokens.

    Numbers are near 10 to the exponent, and whole multiples of a power of two: `dtype` holds them and their sums exactly.
    """
    dice = random.Random(seed)

    unit = mp.mpf(2) ** round(exponent * math.log2(10))

    def number() -> mp.mpf:
        return dice.randint(-9, 9) * unit

    rows = []
    for group in (3, 7):
        for _ in range(dice.randint(2, 3)):
            width = dice.randint(1, 3)
            mask = [token < width for token in range(3)]
            a = [number() for _ in mask]
            rows.append(
                reference.Row(
                    group, True, mask, a, [number() for _ in mask], mask, mask, [number()] * 3, number()
                )
            )
    return rows


def gigpo(rows: list[reference.Row]) -> list[list]:
    """Every token is a turn, and all find one state."""

    def standardised(value, pool):
        average, variance = reference.moments(pool)
        return (value - average) / (mp.sqrt(variance) + 1e-6) if len(set(pool)) > 1 else mp.mpf(0)

    def worth(row, turn):
        return mp.fsum(mp.mpf(GAMMA) ** (u - turn) * row.a[u] for u in row.used if u >= turn)

    advantages = []
    for row in rows:
        peers = [peer for peer in rows if peer.group == row.group]
        pool = [worth(peer, turn) for peer in peers for turn in peer.used]
        standing = standardised(reference.score(row), reference.scores(peers))
        steps = [
            standing + OMEGA * standardised(worth(row, turn), pool) if turn in row.used else 0
            for turn in range(3)
        ]
        advantages.append(steps)
    return advantages


def answer(name: str, rows: list[reference.Row], dtype: torch.dtype) -> torch.Tensor:
    if name != "gigpo":
        return reference.call(ADVANTAGE_ESTIMATORS, name, rows, dtype, garbage=0.0)
    rewards = torch.tensor([[float(reward) for reward in row.a] for row in rows], dtype=dtype)
    turns = torch.arange(3).expand(len(rows), 3)
    groups = torch.tensor([row.group for row in rows])
    mask = torch.tensor([row.mask for row in rows])
    return ADVANTAGE_ESTIMATORS[name](rewards, mask, groups, turns=turns, states=torch.ones(len(rows), 3))


def numbers_of(name: str, rows: list[reference.Row]) -> list:
    """Return all numbers that the estimator reads."""
    read = []
    for row in rows:
        read += [row.a[t] for t in row.used]
        if name in ("gdpo", "prime_rloo"):
            read += [row.b[t] for t in row.used]
        if name in ("gae", "decoupled_gae"):
            read += [row.values[t] for t in row.used]
        if name == "remax":
            read.append(row.baseline)
    return read


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 2**32),
    exponent=st.one_of(st.integers(-306, 306), st.sampled_from([37, 38, 39, 99, 100, 159, 160, 306])),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=25, deadline=None)
def test_any_finite_reward_gives_the_advantages_of_the_definition_or_is_refused_by_name(
    name, seed, exponent, dtype
):
    if dtype is torch.float32:
        exponent = max(-36, min(exponent, 37))
    rows = batch(seed, exponent)
    expected = gigpo(rows) if name == "gigpo" else reference.definition(name, rows)
    flat = [value for row in expected for value in row]
    is_too_large = max(map(abs, numbers_of(name, rows))) > LARGEST
    if is_too_large or max(map(abs, flat)) > LARGEST_OF[dtype]:
        with pytest.raises(ValueError, match=r"of rows \[[\d, ]+\] (are beyond|by \w+ are not finite in)"):
            answer(name, rows, dtype)
        return
    scale = max(map(abs, flat))
    got = answer(name, rows, dtype).flatten().tolist()
    for value, exact in zip(got, flat, strict=True):
        assert math.isfinite(value)
        assert abs(value - exact) <= RELATIVE[dtype] * scale + SMALLEST[dtype]
        assert value != 0 or abs(exact) <= RELATIVE[dtype] * scale + SMALLEST[dtype]


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "grpo_batch_std", "gdpo", "grpo_process", "gigpo"])
@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e-30, 1.0, 1e30, 1e99])
def test_without_an_epsilon_the_size_of_the_rewards_does_not_matter(name, size):
    """2 0 -1: mean 1/3, deviation sqrt(7/3)."""
    rewards = size * torch.tensor([[2.0], [0.0], [-1.0]], dtype=torch.float64)
    inputs = {"turns": torch.zeros(3, 1), "states": torch.zeros(3, 1)} if name == "gigpo" else {}
    paid = {"a": rewards} if name == "gdpo" else rewards
    estimator = ADVANTAGE_ESTIMATORS[name]
    got = (
        estimator(paid, torch.ones(3, 1), torch.zeros(3, dtype=torch.int64), eps=0.0, **inputs)
        .flatten()
        .tolist()
    )
    if name == "grpo_passk":
        assert got == pytest.approx([2 / math.sqrt(7 / 3), 0, 0])
        return
    assert got == pytest.approx([(r - 1 / 3) / math.sqrt(7 / 3) for r in (2, 0, -1)], rel=1e-7)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gdpo", {"weights": {"a": 1e300}}),
        ("prime_rloo", {"weights": {"a": 1e300}}),
        ("reinforce_plus_plus", {"gamma": 1e200}),
    ],
)
def test_options_that_overflow_the_statistics_are_refused_and_give_no_zeros(name, options):
    rewards = torch.tensor([[1.0, 1e9], [0.0, 0.0]], dtype=torch.float64)
    paid = {"a": rewards} if name != "reinforce_plus_plus" else rewards
    refusal = f"the advantages of rows .* by {name} are not finite in torch.float64: rewards or options are too large"
    with pytest.raises(ValueError, match=refusal):
        ADVANTAGE_ESTIMATORS[name](paid, torch.ones(2, 2), torch.zeros(2, dtype=torch.int64), **options)
