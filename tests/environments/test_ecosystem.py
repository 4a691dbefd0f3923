"""Adapters of other packages' environments, with the real packages: rows, turns, rewards, what is refused at start."""

import os
import re
import sys
from collections import Counter

import pytest
from chat_templates import MODEL
from environment_packages import PACKAGES, there
from scripted_play import SETTINGS, OneSession, prompt_of, run, trajectories

from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.make import make_played, rows_of, source_of
from async_grpo.errors import ConfigurationError

pytestmark = pytest.mark.skipif(not there("textarena"), reason="they are not there: scripts/setup_extras")


@pytest.fixture(autouse=True)
def _extras(monkeypatch):
    """The packages stand apart from the others, as their users would not all have them; here and in child processes."""
    monkeypatch.syspath_prepend(PACKAGES)
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def playing(name: str, say, **options) -> tuple:
    config = EnvironmentConfig(environment=name, environment_processes=1, **options)
    generation = OneSession(say)
    return make_played(config, str(MODEL), SETTINGS, source_of(name), generation), generation, config


def test_tasks_of_a_mixture_come_by_their_weights_and_the_held_out_ones_are_others():
    name = "reasoning_gym:chain_sum=3,leg_counting"
    config = EnvironmentConfig(environment=name, environment_options="tasks=40,prompt=direct")
    train, held_out = rows_of(config, "train"), rows_of(config, "eval")
    assert Counter(row["task"] for row in train) == {"chain_sum": 30, "leg_counting": 10}
    assert rows_of(config, "train") == train  # the next start finds the same ones
    questions = [{row["messages"][-1]["content"] for row in rows} for rows in (train, held_out)]
    assert not questions[0] & questions[1]
    assert all([said["role"] for said in row["messages"]] == ["system", "user"] for row in train)


def test_what_is_answered_is_scored_by_the_tasks_own_verifier():
    config = EnvironmentConfig(environment="reasoning_gym:chain_sum", environment_options="tasks=4")
    row = rows_of(config, "train")[2]
    # by arithmetic of our own, from the question's text
    terms = re.search(r"problem: (.*) =", row["messages"][-1]["content"])[1].replace(" ", "")
    right = sum(int(term) for term in re.findall(r"[+-]?\d+", terms))
    said = iter([f"so <answer>{right}</answer>", f"{right}", f"<answer>{right + 1}</answer>", "no idea"])
    played, _, _ = playing("reasoning_gym:chain_sum", lambda: next(said), environment_options="tasks=4")
    found = run(trajectories(played, prompt_of(**row), count=4))
    rewards = sorted(one.outcome.reward for one in found)
    assert rewards[2:] == [1.0, 1.0] and max(rewards[:2]) < 0.5, rewards
    assert {one.outcome.numbers["chain_sum"] for one in found} == set(rewards)
    assert all(len(one.turns) == 1 for one in found)


def test_an_answer_that_its_scorer_stumbles_over_is_wrong_and_no_failure():
    config = EnvironmentConfig(environment="reasoning_gym:prime_factorization", environment_options="tasks=1")
    (row,) = rows_of(config, "train")
    played, *_ = playing(
        config.environment, lambda: "<answer>no</answer>", environment_options=config.environment_options
    )
    (one,) = run(trajectories(played, prompt_of(**row)))
    assert one.outcome.reward == 0.0 and not one.outcome.failure


@pytest.mark.parametrize(
    ("task", "said"), [("game_of_life", "{}"), ("boxnet", "[1]"), ("coin_flip", "1e999"), ("boxnet", "{")]
)
def test_whatever_a_scorer_stumbles_over_is_wrong_but_not_if_it_stumbles_over_the_right_answer_too(
    monkeypatch, task, said
):
    from async_grpo.environments.ecosystem.reasoning_gym import ReasoningGym

    environment = ReasoningGym()
    (row,) = ReasoningGym.rows("train", task, tasks=1)
    environment.reset(row, 0)
    assert environment.step(f"<answer>{said}</answer>") == (None, 0.0, True)

    def broken(answer, entry):
        raise ImportError("the scorer lacks a package")

    monkeypatch.setattr(environment._tasks, "score_answer", broken)
    with pytest.raises(ImportError):
        environment.step(said)


def test_levels_are_those_of_the_tasks_own_curriculum():
    config = EnvironmentConfig(
        environment="reasoning_gym:chain_sum", environment_options="tasks=50,levels=3,prompt=none"
    )
    rows = rows_of(config, "train")
    assert Counter(row["level"] for row in rows) == {0: 50, 1: 50, 2: 50}
    lengths = [max(len(row["messages"][0]["content"]) for row in rows if row["level"] == n) for n in range(3)]
    assert lengths == sorted(set(lengths))  # more terms, more digits


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("reasoning_gym:chain_sums", "", r"'chain_sums' is unknown; did you mean chain_sum, "),
        ("reasoning_gym:chain_sum=0", "", "the weight '0' of chain_sum"),
        ("reasoning_gym:chain_sum", "prompt=no", "there are .*default"),
        ("reasoning_gym:", "", "say which one, reasoning_gym:NAME"),
        ("textarena:GuessTheNumbr-v0", "", "did you mean GuessTheNumber-v0"),
        ("textarena:TicTacToe-v0", "", "number of players"),
        ("openenv:echo", "", "name a server's URL or PACKAGE.MODULE:CLASS"),
        ("guess", "", "makes no rows"),
        ("textarina:X", "", "unknown; known: guess.*did you mean textarena:NAME"),
    ],
)
def test_what_cannot_be_played_is_refused_at_start(name, options, message):
    config = EnvironmentConfig(environment=name, environment_options=options)
    with pytest.raises(ConfigurationError, match=message):
        rows_of(config, "train")


def test_a_package_that_is_not_there_is_named_with_the_way_to_get_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("textarena")]:
        monkeypatch.delitem(sys.modules, name)  # the package, and the adapter of it
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigurationError, match="is it installed\\? pip install textarena"):
        source_of("textarena:GuessTheNumber-v0")


def test_a_game_is_played_turn_by_turn_until_it_is_won():
    name = "textarena:GuessTheNumber-v0"
    config = EnvironmentConfig(environment=name, environment_options="tasks=3")
    rows, held_out = rows_of(config, "train"), rows_of(config, "eval")
    assert len({row["seed"] for row in rows + held_out}) == 6
    import textarena

    game = textarena.make("GuessTheNumber-v0-raw")
    game.reset(num_players=1, seed=rows[1]["seed"])
    secret, near = game.game_number, 1 if game.game_number > 10 else 20
    moves = iter([f"[{near}]", "a move without a number", f"now {secret}? [{secret}]"])
    played, *_ = playing(name, lambda: next(moves))
    (one,) = run(trajectories(played, prompt_of(**rows[1])))
    first, second, third = (turn.before_text for turn in one.turns)
    assert "Guess The Number" in first and "Guess The Number" not in second + third  # nothing is told twice
    assert ("higher" if near == 1 else "lower") in second and "invalid move" in third
    assert one.outcome.turn_rewards == (0.0, 0.0, 1.0) and one.outcome.numbers["invalid_move"] == 0.0


def test_a_game_draws_the_same_whatever_is_played_beside_it():
    make = source_of("textarena:2048-v0").object()
    one, other, between = make("2048-v0"), make("2048-v0"), make("2048-v0")
    assert one.reset({}, 5) == other.reset({}, 5) != between.reset({}, 6)
    for move in ("[left]", "[up]", "[right]", "[down]") * 3:
        told = one.step(move)
        between.step(move)
        assert other.step(move) == told
