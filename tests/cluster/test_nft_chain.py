"""A whole run by DiffusionNFT, in one process: the old policy draws, is proven, saved, resumed and exported."""

import numpy as np
import pytest
import torch
from flow_chain import FlowChain, TextChain, darkness
from safetensors.torch import load_file
from tiny_flow import NEEDS_DIFFUSERS
from tiny_pipelines import PICTURE_SIZE, save_tiny_pipeline

from async_grpo.launch.export import ExportConfig, export
from async_grpo.testing import FakeVerification

pytestmark = [NEEDS_DIFFUSERS, pytest.mark.timeout(120)]

NFT = {
    "flow_loss": "diffusion_nft",
    "temperature": 1.0,
    "kl_coef": 0.0,
    "nft_old_decay_growth": 0.3,
}
FLOW = {"trains_finished": True, "window": 0}
FILE = "transformer/diffusion_pytorch_model.safetensors"


def old_weights(chain):
    """Return the weights of the old policy, by name."""
    return {name: tensor.clone() for name, tensor in chain.trainer.reference.named_weights()}


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_engines_checkpoints_and_exports_have_the_old_policy(tmp_path, lora_rank):
    options = {**NFT, "lora_rank": lora_rank}
    first = FlowChain(tmp_path, steps=3, flow=FLOW, **options)
    lines = first.train(lambda: FakeVerification(darkness))
    assert [line["nft_old_decay"] for line in lines] == pytest.approx([0.3, 0.5, 0.5])
    assert all(line["avg_output_tokens"] == 1 and line["update_skipped"] == 0 for line in lines)
    assert all(line["canary_error"] < 1e-4 for line in lines if "canary_error" in line)
    # At first, both policies are the same
    assert lines[0]["nft_old_distance"] == 0 < lines[1]["nft_old_distance"]
    assert lines[0]["nft_probability"] == pytest.approx(0.5, abs=0.1)

    trained = dict(first.trainer.policy.model.named_parameters())
    old = old_weights(first)
    assert any(not torch.equal(trained[name], tensor) for name, tensor in old.items())
    in_engine = first.worker.engine._policy.model.state_dict()
    exported = load_file(tmp_path / "out" / "hf_format" / "samples_24" / FILE)
    for name, tensor in exported.items():
        torch.testing.assert_close(in_engine[name], tensor)
    if not lora_rank:
        assert all(torch.equal(exported[name], tensor) for name, tensor in old.items())
    export(ExportConfig(path=str(tmp_path / "out"), output_dir=str(tmp_path / "whole"), dtype="float32"))
    for name, tensor in load_file(tmp_path / "whole" / FILE).items():
        torch.testing.assert_close(tensor, exported[name])

    second = FlowChain(tmp_path, steps=4, flow=FLOW, **options)
    lines = second.train(lambda: FakeVerification(darkness))
    assert [line["step"] for line in lines] == [4]
    # A run that had lost the old policy would begin with two equal policies
    assert lines[0]["nft_old_distance"] > 0


def test_the_policy_learns_to_draw_darker_pictures_one_step_behind(tmp_path):
    chain = FlowChain(tmp_path, steps=40, flow=FLOW, max_staleness=1, **NFT)
    lines = chain.train(lambda: FakeVerification(darkness))
    rewards = [line["avg_reward"] for line in lines]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    assert max(line["staleness_max"] for line in lines) == 1


def test_a_run_that_draws_from_texts_goes_on_from_finished_pictures(tmp_path):
    save_tiny_pipeline("stable_diffusion_3", tmp_path / "model")
    options = {
        "flow": {**FLOW, "picture_size": PICTURE_SIZE},
        "picture_size": PICTURE_SIZE,
        "max_staleness": 1,
    }
    lines = TextChain(tmp_path, steps=2, **options, **NFT).train(lambda: FakeVerification(darkness))
    assert all(line["update_skipped"] == 0 for line in lines)
    lines = TextChain(tmp_path, steps=3, **options, **NFT).train(lambda: FakeVerification(darkness))
    assert [line["step"] for line in lines] == [3] and lines[0]["update_skipped"] == 0


def test_several_passes_over_a_batch_keep_the_old_policy_until_its_end(tmp_path):
    chain = FlowChain(tmp_path, steps=4, flow=FLOW, passes_per_batch=2, max_staleness=3, **NFT)
    lines = chain.train(lambda: FakeVerification(darkness))
    # Two passes over each of four batches. The old policy moves after the last pass
    assert ["nft_old_decay" in line for line in lines] == [False, True] * 4
    assert lines[3]["nft_old_decay"] == 0.5
    assert lines[1]["nft_old_distance"] > lines[0]["nft_old_distance"] == 0
