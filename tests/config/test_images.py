"""What a run with images needs, stores and refuses before it starts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from vision_model import save_vision_model
from vision_prompts import picture_row

from async_grpo.config.preflight import prepare
from async_grpo.config.run import RunConfig
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def config(model, tmp_path) -> RunConfig:
    rows = [picture_row(()), picture_row((0,)), picture_row((1, 0))]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        model_name_or_path=str(model),
        data_path=str(data),
        reward_fns="format",
        output_dir=str(tmp_path / "run"),
        max_generation_tokens=16,
        max_tokens_per_gpu=1024,
        kl_coef=0.0,
    )


def test_a_run_knows_the_tokens_of_images_and_stores_those_that_stay_once(config):
    prepared = prepare(config)
    images = config.output_path / "images"
    assert not images.exists()
    settings = prepared.settings
    assert settings.most_images == 2 and settings.image_token_id in settings.unsampled_token_ids
    assert settings.image_processor.startswith("Qwen2VLImageProcessor")
    assert prepared.facts.unsampled_token_ids == settings.unsampled_token_ids
    sent = prepared.store_images()
    # Images of a group are written when it is admitted
    canary = sent.settings.image_canary.image.digest
    assert sent.images is None and sent.facts.kept_images == {canary}
    assert [path.name for path in images.iterdir()] == [canary]
    recorded = prepare(replace(config, record=True)).store_images()
    used = {image.digest for question in sent.questions for image in question.images}
    assert {path.name for path in images.iterdir()} == used | {canary} == recorded.facts.kept_images
    assert len(used) == 2


def test_images_of_an_evaluation_stay_and_an_environment_may_send_more_images_than_the_rows(config, tmp_path):
    held_out = tmp_path / "heldout.jsonl"
    held_out.write_text(json.dumps(picture_row((5,))) + "\n")
    prepared = prepare(replace(config, eval_data_path=str(held_out), environment="guess"))
    ((question,),) = prepared.eval_questions.values()
    (image,) = question.images
    assert image.digest in prepared.facts.kept_images and prepared.settings.most_images == 16
    prepared.store_images()
    assert image.digest in {path.name for path in (config.output_path / "images").iterdir()}


def test_a_text_of_the_canary_has_an_image_if_it_fits_the_context(config):
    settings = prepare(config).settings
    canary = settings.image_canary
    text = np.array(canary.token_ids, np.int32)
    assert (text == settings.image_token_id).sum() == canary.image.num_tokens == 16
    assert canary.images_of(text) == (canary.image,) and canary.images_of(text[1:]) == ()
    # No other placeholder, for which there would be no image
    rest = text[2 + canary.image.num_tokens :]
    assert len(rest) == 32 and not np.isin(rest, settings.unsampled_token_ids).any()
    rows = Path(config.data_path)
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "3?"}]}) + "\n")
    short = replace(config, max_generation_tokens=8)
    assert prepare(short).settings.image_canary is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"observation_coef": 0.1, "environment": "guess"},
            "--observation-coef 0.1: the policy would learn to write the placeholders",
        ),
        (
            {"lora_rank": 8, "lora_sync": "adapter"},
            "--lora-sync adapter: engines do not apply adapters to models that read images",
        ),
    ],
)
def test_what_does_not_work_with_images_is_refused_by_name(config, changes, problem):
    with pytest.raises(ConfigurationError, match=problem):
        prepare(replace(config, **changes))


def test_an_adapter_is_for_the_language_model_alone(config):
    lora = prepare(replace(config, lora_rank=8)).settings.lora
    assert lora is not None and len(lora.layers) == 2 * 7  # two layers of seven matrices
    assert all("language_model.layers." in name for name in lora.layers)


def test_freezing_the_vision_tower_of_a_model_of_texts_is_refused(config, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "3 + 4?", "answer": "7"}) + "\n")
    with pytest.raises(ConfigurationError, match="the model is of the type 'qwen2', which reads no images"):
        prepare(replace(config, model_name_or_path=str(TINY_MODEL), freeze_vision=True))


def test_a_lost_image_is_named_with_its_row_at_the_start(config, tmp_path):
    row = picture_row((0,))
    row["messages"][0]["content"][0] = {"type": "image", "image": "lost.png"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(
        ConfigurationError, match=r"rows.jsonl.*1: image 1 of 1: there is no image .*lost.png"
    ):
        prepare(config)
