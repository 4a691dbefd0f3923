"""The gradient of a step with images equals that of transformers, also if only one of two ranks has an image."""

import shutil
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
from async_grpo.messages import LoraSettings, dummy_micro_batch
from async_grpo.modeling import packed
from async_grpo.modeling.image_models import ImageReader, freeze_vision
from async_grpo.modeling.load import load_causal_lm, load_config
from async_grpo.modeling.lora import add_lora, fill_lora, linear_layers, new_lora_tensors
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


def step(
    ranks, folder: Path, *, freezes: bool = False, has_lora: bool = False, compiles: bool = False
) -> dict[str, torch.Tensor]:
    """The gradients of one step. Rank 0 has the prompts with pictures, rank 1 that without, and then none."""
    policy = PolicyModel(load_causal_lm(folder / "model", "float32"))
    policy.image_reader = ImageReader.load(folder / "model", load_config(folder / "model"))
    if freezes:
        freeze_vision(policy.model)
    if has_lora:
        lora = lora_of(policy.model)
        add_lora(policy.model, lora)
        fill_lora(policy.model, lora, seed=0, device=torch.device("cpu"))
    shard_policy(policy, ranks, OptimizerConfig(torch_compile=compiles), "float32")
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
    return {
        "all": step(ranks, folder),
        "frozen": step(ranks, folder, freezes=True),
        "lora": step(ranks, folder, has_lora=True),
    }


def lora_of(model) -> LoraSettings:
    return LoraSettings(rank=4, scaling=2.0, layers=tuple(linear_layers(model)), sync="merged")


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
    # B is zero at first, so the gradient of A is zero, and that of B is the scale times that of the weight times A^T
    layers = linear_layers(vision_model())
    assert layers and not any(".visual." in layer for layer in layers)
    shapes = {f"{layer}.lora_A": (4, expected[f"model.{layer}.weight"].shape[1]) for layer in layers}
    matrices = new_lora_tensors(
        {f"base_model.model.{name}.weight": shape for name, shape in shapes.items()}, 0
    )
    expected_lora = {}
    for layer in layers:
        matrix = matrices[f"base_model.model.{layer}.lora_A.weight"]
        gradient_of_weight = expected[f"model.{layer}.weight"]
        expected_lora[f"model.{layer}.lora_A.default.weight"] = torch.zeros_like(matrix)
        expected_lora[f"model.{layer}.lora_B.default.weight"] = 2.0 * gradient_of_weight @ matrix.T
    assert gradients["lora"].keys() == expected_lora.keys()
    assert relative_error(gradients["lora"], expected_lora)[0] < 1e-5


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs")
def test_a_compiled_language_model_gives_the_same_gradient(ranks, folder):
    expected = step(ranks, folder)
    torch._dynamo.reset()
    try:
        compiled = step(ranks, folder, compiles=True)
    finally:
        # Compiling registers attention anew, out of the compiler's sight
        packed.ALL_ATTENTION_FUNCTIONS.register(packed.PACKED_ATTENTION, packed.packed_attention)
    assert relative_error(compiled, expected)[0] < 1e-5
