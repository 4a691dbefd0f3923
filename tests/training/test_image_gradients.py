"""The gradient of a step with images equals that of transformers, also if only one of two ranks has an image."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor
from two_ranks import on_two_ranks, recording_accumulator, relative_error
from vision_model import save_vision_model, vision_model
from vision_prompts import picture_row, question, seeded_picture

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.experience.packing import pack
from async_grpo.messages import dummy_micro_batch
from async_grpo.modeling.image_models import ImageReader, freeze_vision
from async_grpo.modeling.load import load_causal_lm, load_config
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import shard_policy
from async_grpo.types import Completion, FinishReason, Prompt, RewardStatus, Sample, Verdict

COMPLETION = np.array([3, 77, 12, 40, 5], np.int32)
ADVANTAGE = 0.7
PICTURES = [(0, 1), (), (2,)]  # seeds of the pictures of three prompts


def sample(folder: Path, ordinal: int) -> Sample:
    """A sample with the pictures of `PICTURES`, every token of which is trained on."""
    asked = question(folder / "model", folder / "images", picture_row(PICTURES[ordinal]))
    completion = Completion(
        token_ids=COMPLETION,
        logprobs=np.zeros(len(COMPLETION), np.float32),
        versions=np.zeros(len(COMPLETION), np.int32),
        finish_reason=FinishReason.STOP,
        text="",
    )
    return Sample(
        Prompt(ordinal, asked.token_ids, asked.row, ordinal, asked.images),
        completion,
        Verdict(RewardStatus.OK, 1.0),
        advantages=np.full(len(COMPLETION), ADVANTAGE, np.float32),
        loss_mask=np.ones(len(COMPLETION), bool),
        group_tokens=len(COMPLETION),
    )


def step(ranks, folder: Path, *, freezes: bool) -> dict[str, torch.Tensor]:
    """The gradients of one step. Rank 0 has the prompts with pictures, rank 1 that without, and then none."""
    policy = PolicyModel(load_causal_lm(folder / "model", "float32"))
    policy.image_reader = ImageReader.load(folder / "model", load_config(folder / "model"))
    if freezes:
        freeze_vision(policy.model)
    shard_policy(policy, ranks, OptimizerConfig(), "float32")
    objective = Objective(AlgorithmConfig(policy_loss="grpo", kl_coef=0.0))
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    if ranks.rank == 0:
        batches = [pack([sample(folder, 0)]), pack([sample(folder, 2)])]
    else:
        batches = [pack([sample(folder, 1)]), dummy_micro_batch(0)]
    for batch in batches:
        accumulator.add(batch)
    accumulator.finish()
    return optimizer.gradients


def work(ranks, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {"all": step(ranks, folder, freezes=False), "frozen": step(ranks, folder, freezes=True)}


def reference_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """transformers' own forward of each sequence alone, and the mean loss of all tokens."""
    model = vision_model()
    processor = AutoImageProcessor.from_pretrained(folder / "model")
    losses = []
    for ordinal, seeds in enumerate(PICTURES):
        prompt = sample(folder, ordinal).prompt
        ids = torch.tensor(np.concatenate([prompt.token_ids, COMPLETION]), dtype=torch.int64)[None]
        arguments = {}
        if seeds:
            pictures = [seeded_picture(seed) for seed in seeds]
            arguments = dict(processor(images=pictures, return_tensors="pt"))
            arguments["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        logprobs = model(input_ids=ids, **arguments).logits[0].log_softmax(-1)
        chosen = logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        losses.append(-ADVANTAGE * chosen[-len(COMPLETION) :])
    torch.cat(losses).mean().backward()
    return {f"model.{name}": weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    save_vision_model(folder / "model")
    return folder


def test_two_ranks_of_which_one_has_images_make_the_gradient_of_transformers(folder):
    gradients = on_two_ranks(work, folder)
    expected = reference_gradients(folder)
    whole, worst = relative_error(gradients["all"], expected)
    assert gradients["all"].keys() == expected.keys()
    assert whole < 1e-5 and worst < 1e-4
    text = {name: gradient for name, gradient in expected.items() if ".visual." not in name}
    assert gradients["frozen"].keys() == text.keys()
    assert relative_error(gradients["frozen"], text)[0] < 1e-5
