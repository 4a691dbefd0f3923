"""The packed forward of prompts with images, against transformers' own forward of each sequence alone."""

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from vision_model import save_vision_model, vision_model
from vision_prompts import logprobs_alone, picture_row, question, seeded_picture

from async_grpo.errors import ConfigurationError, ImagesDiffer
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.image_models import (
    ImageReader,
    ImageSpan,
    freeze_vision,
    token_positions,
    unsampled_token_ids,
)
from async_grpo.modeling.load import load_causal_lm, load_config
from async_grpo.modeling.policy import PolicyModel
from async_grpo.processes.image_files import IMAGE_MODEL_TYPES

REFERENCE = vision_model()
COMPLETION = np.array([3, 77, 12, 40, 5], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def policy(folder) -> PolicyModel:
    model = PolicyModel(load_causal_lm(folder, "float32"))
    model.image_reader = ImageReader.load(folder, load_config(folder))
    return model.eval()


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    """Questions with the pictures of these seeds."""
    images = tmp_path_factory.mktemp("images")

    def make(*seeds: int, text: str = "What is this?"):
        return question(folder, images, picture_row(seeds, text))

    return make


def packed(policy, questions, completions):
    """Log-probs of each question with its completion, from one packed forward."""
    sequences = [
        np.concatenate([question.token_ids, completion])
        for question, completion in zip(questions, completions, strict=True)
    ]
    logprobs = packed_forward(policy, sequences, questions)
    bounds = np.cumsum([0, *map(len, sequences)])
    return sequences, np.split(logprobs.detach().numpy(), bounds[1:-1])


def packed_forward(policy, sequences, questions) -> torch.Tensor:
    """Return the log-probs of the sequences end to end, with their graph."""
    ids = np.concatenate(sequences)
    bounds = np.cumsum([0, *map(len, sequences)])
    logprobs, *_ = policy(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(bounds),
        torch.ones(len(ids), dtype=torch.bool),
        1.0,
        None,
        policy.image_inputs([question.images for question in questions], ids, bounds),
    )
    return logprobs


@pytest.mark.parametrize("kind", IMAGE_MODEL_TYPES)
def test_packed_logprobs_with_images_equal_those_of_each_sequence_alone(kind, tmp_path):
    folder = save_vision_model(tmp_path / "model", kind=kind)
    reference = vision_model(kind=kind)
    policy = PolicyModel(load_causal_lm(folder, "float32")).eval()
    policy.image_reader = ImageReader.load(folder, load_config(folder))
    check_forward(policy, torch.float32)
    # The same prompt twice, as members of a group; the same token ids with another image; no, one and three images
    seeds = [(), (0,), (0,), (2,), (1, 0, 3), (0, 0)]
    completions = [COMPLETION, COMPLETION, COMPLETION[::-1], COMPLETION, COMPLETION, COMPLETION]
    questions = [question(folder, tmp_path / "images", picture_row(several)) for several in seeds]
    sequences, logprobs = packed(policy, questions, completions)
    for several, sequence, ours in zip(seeds, sequences, logprobs, strict=True):
        alone = logprobs_alone(reference, folder, sequence, [seeded_picture(seed) for seed in several])
        np.testing.assert_allclose(ours, alone, atol=2e-5)


def test_another_image_of_the_same_size_changes_the_logprobs(policy, made):
    _, (first, second) = packed(policy, [made(0), made(2)], [COMPLETION, COMPLETION])
    assert np.abs(first - second)[-len(COMPLETION) :].max() > 1e-3


def test_token_positions_equal_those_of_transformers(made):
    both = made(1, 0)
    ids = torch.tensor(both.token_ids, dtype=torch.int64)[None]
    is_image = (ids == REFERENCE.config.image_token_id).int()
    grids = torch.tensor([[1, 4, 8], [1, 8, 6]])
    expected, _ = REFERENCE.model.get_rope_index(ids, is_image, grids)
    begins = np.flatnonzero(np.diff(is_image[0].numpy(), prepend=0) == 1)
    spans = [ImageSpan(int(begins[0]), 2, 4), ImageSpan(int(begins[1]), 4, 3)]
    assert token_positions(ids.shape[1], spans).tolist() == expected[:, 0].tolist()


def test_gradients_reach_the_vision_tower_with_and_without_images(folder, made):
    policy = PolicyModel(load_causal_lm(folder, "float32"))
    policy.image_reader = ImageReader.load(folder, load_config(folder))
    tower = policy.model.base_model.visual
    for seeds, is_used in (((), False), ((0,), True)):
        question_here = made(*seeds)
        sequence = np.concatenate([question_here.token_ids, COMPLETION])
        logprobs = packed_forward(policy, [sequence], [question_here])
        policy.zero_grad()
        logprobs.sum().backward()
        # Every rank of a sharded tower must compute a gradient, so that it is zero and not missing without images
        assert all(weight.grad is not None for weight in tower.parameters())
        assert any(weight.grad.abs().max() > 0 for weight in tower.parameters()) == is_used


def test_a_frozen_vision_tower_gets_no_gradient(folder, made):
    policy = PolicyModel(load_causal_lm(folder, "float32"))
    policy.image_reader = ImageReader.load(folder, load_config(folder))
    freeze_vision(policy.model)
    question_here = made(0)
    ids = np.concatenate([question_here.token_ids, COMPLETION])
    bounds = np.array([0, len(ids)])
    images = policy.image_inputs([question_here.images], ids, bounds)
    mask = torch.ones(len(ids), dtype=torch.bool)
    logprobs, *_ = policy(torch.tensor(ids, dtype=torch.int64), torch.tensor(bounds), mask, 1.0, None, images)
    logprobs.sum().backward()
    assert all(weight.grad is None for weight in policy.model.base_model.visual.parameters())
    assert policy.model.base_model.language_model.layers[0].mlp.up_proj.weight.grad is not None


def test_a_swapped_image_is_refused_by_name(policy, made):
    first, second = made(0), made(2)
    swapped = dataclasses.replace(first.images[0], path=second.images[0].path)
    with pytest.raises(ImagesDiffer, match="holds another image than at the start of the run"):
        packed(policy, [dataclasses.replace(first, images=(swapped,))], [COMPLETION])


def test_a_sampled_or_twice_expanded_placeholder_is_refused_by_name(policy, made):
    placeholder = REFERENCE.config.image_token_id
    with pytest.raises(ImagesDiffer, match="image tokens, and its 1 images have 12"):
        packed(policy, [made(0)], [np.array([3, placeholder], np.int32)])


def test_a_missing_image_names_its_file(policy, made):
    lost = copy.copy(made(0))
    reference = dataclasses.replace(lost.images[0], path="/nowhere/picture")
    with pytest.raises(ConfigurationError, match="/nowhere/picture cannot be read on this node"):
        packed(policy, [dataclasses.replace(lost, images=(reference,))], [COMPLETION])


def test_tokens_of_images_and_videos_are_not_sampled():
    config = REFERENCE.config
    assert unsampled_token_ids(config) == (config.image_token_id, config.video_token_id)


def test_a_folder_without_an_image_processor_is_refused(folder, tmp_path):
    for path in folder.iterdir():
        if path.name != "preprocessor_config.json":
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ConfigurationError, match="the image processor in .* cannot be read"):
        ImageReader.load(tmp_path, load_config(folder))


def test_a_processor_of_another_model_is_refused(folder, tmp_path):
    text = (folder / "preprocessor_config.json").read_text().replace('"patch_size": 14', '"patch_size": 16')
    (tmp_path / "preprocessor_config.json").write_text(text)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigurationError, match=r"patches of \(16, 2, 2\)"):
        ImageReader.load(tmp_path, load_config(folder))
