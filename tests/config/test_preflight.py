"""What is looked up once before anything starts, and what a run is refused for."""

import json
import shutil
from pathlib import Path

import pytest

from async_grpo.config import rewards
from async_grpo.config.preflight import prepare
from async_grpo.config.run import RunConfig
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.errors import ConfigurationError


def config(tmp_path: Path, **changes) -> RunConfig:
    given = {"model_name_or_path": str(TINY_MODEL), "data_path": str(COUNTDOWN_TRAIN)}
    given |= {
        "reward_fns": "countdown,format",
        "max_generation_tokens": 24,
        "output_dir": str(tmp_path / "out"),
    }
    return RunConfig(**given | changes)


def test_the_rewards_of_a_run_are_looked_up_once(tmp_path, monkeypatch):
    asked, real = [], rewards.resolve
    monkeypatch.setattr(rewards, "resolve", lambda *args: asked.append(args) or real(*args))
    prepared = prepare(config(tmp_path))
    assert prepared.facts.process_rewards == ()
    assert (
        prepared.facts.hidden_size
        == json.loads((Path(TINY_MODEL) / "config.json").read_text())["hidden_size"]
    )
    assert len(asked) == 1


def test_rewards_that_only_the_workers_name_are_checked_like_those_of_the_trainer(tmp_path):
    prepared = prepare(config(tmp_path, reward_fns="", on_reward_failure="other=refill"))
    assert prepared.rewards is None
    with pytest.raises(ConfigurationError, match="other=refill names other"):
        prepared.with_rewards("countdown")
    assert prepare(config(tmp_path, reward_fns="")).with_rewards("countdown").config.reward_fns == "countdown"


def test_a_model_folder_without_a_tokenizer_is_refused(tmp_path):
    """transformers makes an empty one without a word, and every completion would be the text ''."""
    folder = tmp_path / "model"
    shutil.copytree(TINY_MODEL, folder)
    for file in folder.glob("token*"):
        file.unlink()
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"input_token_ids": [5, 6, 7], "answer": 1}) + "\n")
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        prepare(config(tmp_path, model_name_or_path=str(folder), data_path=str(data)))


def test_lengths_go_by_the_completion_that_even_the_longest_prompt_has_room_for(tmp_path):
    context = json.loads((Path(TINY_MODEL) / "config.json").read_text())["max_position_embeddings"]
    prepared = prepare(config(tmp_path, max_generation_tokens=10**5, max_tokens_per_gpu=10**6))
    longest_prompt = max(len(question.token_ids) for question in prepared.questions)
    assert prepared.settings.guaranteed_completion_tokens == context - longest_prompt
    assert prepared.facts.max_completion_tokens == context - longest_prompt
    short = prepare(config(tmp_path))
    assert short.facts.max_completion_tokens == 24


def test_a_buffer_of_less_than_a_token_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--overlong-buffer 0.01 of 24 tokens.*less than one token"):
        prepare(config(tmp_path, overlong_buffer=0.01))


GAME = """
from async_grpo.environments.games.guess import Guess

class Own(Guess):
    @staticmethod
    def rows(split):
        return [{"input": "a"}]
"""


@pytest.fixture
def rows_of_a_game(tmp_path) -> dict[str, str]:
    """Return the options of a run whose environment makes the rows."""
    (tmp_path / "game.py").write_text(GAME)
    return {
        "environment": f"{tmp_path}/game.py:Own",
        "data_path": "environment",
        "reward_fns": "environment",
    }


@pytest.mark.parametrize(
    "option", [{"prompt_column": "question"}, {"answer_column": "label"}, {"prompt_as": "text"}], ids=str
)
def test_columns_are_refused_where_the_environment_makes_all_rows(tmp_path, rows_of_a_game, option):
    (name,) = option
    flag = name.replace("_", "-")
    with pytest.raises(
        ConfigurationError, match=f"--{flag} .*the environment makes all rows .* leave it out"
    ):
        prepare(config(tmp_path, **rows_of_a_game, **option))


def test_columns_of_a_held_out_file_are_read_beside_rows_of_the_environment(tmp_path, rows_of_a_game):
    (tmp_path / "held.jsonl").write_text('{"question": "a"}\n')
    held = {"eval_data_path": str(tmp_path / "held.jsonl"), "prompt_column": "question"}
    prepared = prepare(config(tmp_path, **rows_of_a_game, **held))
    assert len(prepared.eval_questions[""]) == 1
    assert prepare(config(tmp_path, **rows_of_a_game)).questions
