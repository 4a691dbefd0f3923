"""A whole run that draws, in one process: engine, controller, trainer, proof of the weights, checkpoint, resumption."""

import numpy as np
import pytest
import torch
from flow_chain import FlowChain, TextChain, darkness
from safetensors.torch import load_file
from tiny_flow import NEEDS_DIFFUSERS
from tiny_pipelines import PICTURE_SIZE, PIPELINES, save_tiny_pipeline

from async_grpo.launch.export import ExportConfig, export
from async_grpo.modeling.flow.folder import read_flow_folder
from async_grpo.testing import FakeVerification

pytestmark = [NEEDS_DIFFUSERS, pytest.mark.timeout(120)]


def test_a_run_draws_trains_proves_its_weights_saves_and_goes_on(tmp_path):
    first = FlowChain(tmp_path, steps=2)
    lines = first.train(lambda: FakeVerification(darkness))
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["ratio_mean"] == pytest.approx(1, abs=1e-5) and lines[0]["avg_kl_div"] < 1e-9
    assert all(line["avg_output_tokens"] == 3 and line["update_skipped"] == 0 for line in lines)
    assert all(line["canary_error"] < 1e-4 for line in lines if "canary_error" in line)
    trained = {name: t.clone() for name, t in first.trainer.policy.model.state_dict().items()}
    in_engine = first.worker.engine._policy.model.state_dict()
    assert all(torch.equal(in_engine[name], trained[name]) for name in trained)
    exported = tmp_path / "out" / "hf_format" / "samples_16" / "transformer"
    assert (exported / "diffusion_pytorch_model.safetensors").is_file()

    second = FlowChain(tmp_path, steps=3)
    lines = second.train(lambda: FakeVerification(darkness))
    assert [line["step"] for line in lines] == [3]
    # The reference of the KL penalty is still the initial model
    assert lines[0]["avg_kl_div"] > 1e-4


def test_the_policy_learns_to_draw_darker_pictures(tmp_path):
    chain = FlowChain(tmp_path, steps=25, kl_coef=0.0, max_staleness=1)
    lines = chain.train(lambda: FakeVerification(darkness))
    rewards = [line["avg_reward"] for line in lines]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1
    assert max(line["staleness_max"] for line in lines) == 1


@pytest.mark.parametrize("name", PIPELINES)
def test_a_run_that_draws_from_texts_trains_saves_and_goes_on_from_unfinished_groups(tmp_path, name):
    save_tiny_pipeline(name, tmp_path / "model")
    options = {
        "flow": {"picture_size": PICTURE_SIZE, "guidance": 3.0},
        "picture_size": PICTURE_SIZE,
        "guidance": 3.0,
        "max_staleness": 1,
        "gradient_checkpointing": True,
    }
    first = TextChain(tmp_path, steps=2, **options)
    lines = first.train(lambda: FakeVerification(darkness))
    assert lines[0]["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert all(line["avg_output_tokens"] == 3 and line["update_skipped"] == 0 for line in lines)
    assert all(line["canary_error"] < 1e-4 for line in lines if "canary_error" in line)
    # One step behind: groups of the next step lie in the checkpoint, with the embeddings of their prompts
    lines = TextChain(tmp_path, steps=3, **options).train(lambda: FakeVerification(darkness))
    assert [line["step"] for line in lines] == [3] and lines[0]["update_skipped"] == 0
    exported = tmp_path / "out" / "hf_format" / "samples_24"
    assert read_flow_folder(exported).fingerprint == read_flow_folder(tmp_path / "model").fingerprint
    encoder = exported / "text_encoder" / "model.safetensors"
    assert encoder.samefile(tmp_path / "model" / "text_encoder" / "model.safetensors")


def test_a_lora_adapter_is_trained_sent_merged_and_exported_as_a_whole_model(tmp_path):
    options = {"lora_rank": 2, "kl_coef": 0.01}
    first = FlowChain(tmp_path, steps=2, **options)
    lines = first.train(lambda: FakeVerification(darkness))
    # The reference of the KL penalty is the model without its adapter
    assert lines[0]["avg_kl_div"] < 1e-9 < lines[1]["avg_kl_div"]
    assert all(line["canary_error"] < 1e-4 for line in lines if "canary_error" in line)
    trained = [name for name, p in first.trainer.policy.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    file = "transformer/diffusion_pytorch_model.safetensors"
    exported = load_file(tmp_path / "out" / "hf_format" / "samples_16" / file)
    base = load_file(tmp_path / "model" / file)
    in_engine = first.worker.engine._policy.model.state_dict()
    for name, tensor in exported.items():
        torch.testing.assert_close(in_engine[name], tensor)
    changed = [name for name, tensor in exported.items() if not torch.equal(tensor, base[name])]
    assert changed and all(name.startswith("transformer_blocks.") for name in changed)
    export(ExportConfig(path=str(tmp_path / "out"), output_dir=str(tmp_path / "whole"), dtype="float32"))
    for name, tensor in load_file(tmp_path / "whole" / file).items():
        torch.testing.assert_close(tensor, exported[name])
    lines = FlowChain(tmp_path, steps=3, **options).train(lambda: FakeVerification(darkness))
    assert [line["step"] for line in lines] == [3] and lines[0]["avg_kl_div"] > 1e-9
