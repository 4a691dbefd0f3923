"""The shipped games, by players whose results can be computed by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest

from async_grpo.environments.games.guess import Guess

DATA = Path(__file__).parents[2] / "sample-data"


def play(seed: int, first: int = 8) -> tuple[float, Guess]:
    """Halving: it finds 15 of 16 numbers in four guesses."""
    game, low, high, total, done = Guess(), 1, 16, 0.0, False
    assert game.reset({}, seed) == "1-16"
    while not done:
        guess = (low + high) // 2
        told, reward, done = game.step(f" {guess} ")
        total += reward
        low, high = (
            (guess + 1, high) if told == "higher" else (low, guess - 1) if told == "lower" else (low, high)
        )
    return total, game


def test_halving_finds_fifteen_of_sixteen_numbers_and_wastes_no_guess():
    found, wasted, numbers = Counter(), 0, set()
    for seed in range(400):
        reward, game = play(seed)
        numbers.add(game._number)
        found[game._number] += reward
        wasted += game.numbers["wasted"]
    assert numbers == set(range(1, 17)) and wasted == 0
    assert [number for number in range(1, 17) if not found[number]] == [16]


@pytest.mark.parametrize("said", ["", "seven", "7.", "-3", "0", "17", "12 13", "99999999999999999999"])
def test_what_is_no_number_of_the_range_wastes_a_guess(said):
    game = Guess()
    game.reset({}, 1)
    assert game.step(said)[1:] == (0.0, False) and game.numbers == {"guesses": 1.0, "wasted": 1.0}


def test_a_number_that_the_answers_exclude_wastes_a_guess_and_equal_knowledge_is_an_equal_state():
    one, two = Guess(), Guess()
    for game in (one, two):
        game.reset({}, 5)
    assert one.state == two.state
    number = one._number
    far = 1 if number > 8 else 16
    one.step(str(far))
    assert one.state != two.state
    assert one.step(str(far))[0] == "?" and one.numbers["wasted"] == 1
    two.step(str(far))
    assert one.state == two.state


def test_the_files_of_the_game_share_no_task():
    train, held_out = (
        {json.loads(line)["seed"] for line in (DATA / f"guess_{name}.jsonl").read_text().splitlines()}
        for name in ("train", "heldout")
    )
    assert len(train) == 512 and len(held_out) == 256 and not train & held_out
