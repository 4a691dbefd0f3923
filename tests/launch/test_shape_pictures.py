"""Pictures of shapes: their answers are right, and the model is trained on the prompts that a run renders."""

import json
import random

import numpy as np
import pytest
from PIL import Image

from async_grpo.data import shapes
from async_grpo.experience.dataset import questions_of
from async_grpo.experience.image_prompts import ImagePrompts
from async_grpo.experience.prompts import PromptRenderer
from async_grpo.modeling.image_models import ImageReader
from async_grpo.modeling.load import load_config

RED = (220, 20, 60)  # crimson


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes") / "shapes"
    shapes.make_shapes(folder, max_steps=1)
    return folder


def test_a_picture_has_as_many_shapes_as_its_answers_say_and_each_in_a_cell_of_its_own():
    source = random.Random(3)
    for _ in range(20):
        picture, counts = shapes.draw_picture(source)
        is_ink = (np.asarray(picture) != 255).any(axis=2)
        cells = is_ink.reshape(shapes.NUM_CELLS, shapes.CELL, shapes.NUM_CELLS, shapes.CELL)
        assert cells.any(axis=(1, 3)).sum() == sum(counts.values())
        assert all(0 <= count <= shapes.MAX_COUNT for count in counts.values())


@pytest.mark.parametrize(("kind", "part_of_box"), [("squares", 1.0), ("circles", 0.78), ("triangles", 0.5)])
def test_a_shape_fills_its_box_as_its_kind_does(kind, part_of_box):
    picture = Image.new("RGB", (64, 64), "white")
    shapes._draw_shape(shapes.ImageDraw.Draw(picture), kind, 32, 32, 20, "crimson")
    is_ink = (np.asarray(picture) == RED).all(axis=2)
    assert is_ink.sum() / 41**2 == pytest.approx(part_of_box, abs=0.04)


def test_rows_are_the_same_whenever_they_are_made_and_held_out_pictures_are_new(tmp_path, folder):
    again = shapes.write_rows(tmp_path, "train", shapes.NUM_TRAIN, seed=1)
    assert again.read_text() == (folder / "train.jsonl").read_text()
    contents = {}
    for name, num_rows in (("train", shapes.NUM_TRAIN), ("heldout", shapes.NUM_HELDOUT)):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert len(rows) == num_rows
        contents[name] = {(folder / row["messages"][0]["content"][0]["image"]).read_bytes() for row in rows}
    assert contents["train"].isdisjoint(contents["heldout"])


def test_the_model_is_trained_on_the_prompts_of_a_run(folder, tmp_path):
    config = load_config(folder / "model")
    tokenizer = shapes.make_tokenizer()
    reader = ImageReader.load(folder / "model", config)
    renderer = PromptRenderer(tokenizer)
    prompts = ImagePrompts(tokenizer, renderer, reader, config.image_token_id, tmp_path / "images")
    row = json.loads((folder / "train.jsonl").read_text().splitlines()[0])
    (asked,) = questions_of([("here:1", row)], tokenizer, 100, len(tokenizer), renderer, prompts, folder)
    lessons = shapes.Lessons(tokenizer, folder / "model", config, seed=5)
    conversation = lessons._conversation(["circles", "squares", "triangles"], [3, 0, 2])
    assert conversation[: len(asked.token_ids)] == asked.token_ids.tolist()
    arguments, answers = lessons.batch(4)
    labels = arguments["labels"]
    for sequence, right in zip(labels, answers, strict=True):
        trained = tokenizer.decode(sequence[sequence >= 0])
        assert trained == "".join(f"{count}<|im_end|>" for count in right)
