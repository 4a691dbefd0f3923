"""A whole run that draws, in one process: engine, controller, trainer, proof of the weights, checkpoint, resumption."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_chain import Chain, chain_config
from tiny_flow import NEEDS_DIFFUSERS, NOISE_LEVEL, NUM_STEPS, flow_settings, save_tiny_flow_model

from async_grpo.cluster.controller import RunController
from async_grpo.experience.dataset import Question
from async_grpo.inference.drawing.engine import DrawingEngine
from async_grpo.messages import WorkerInfo
from async_grpo.rewards.adapter.pictures import with_decoded_picture
from async_grpo.testing import FakeVerification, InProcessRun, InProcessWorker
from async_grpo.training.checkpoint_folder import newest

pytestmark = [NEEDS_DIFFUSERS, pytest.mark.timeout(120)]


class FlowChain(Chain):
    """A `Chain` whose engines draw with a tiny flow-matching model."""

    def __init__(self, folder: Path, steps: int, **changes) -> None:
        self.num_ranks = 1
        self.lines: list[dict] = []
        self.folder = folder / "model"
        if not self.folder.exists():
            save_tiny_flow_model(self.folder)
        options = {
            "policy": "flow",
            "max_generation_tokens": NUM_STEPS,
            "temperature": NOISE_LEVEL,
            "num_training_batches": steps,
            "max_tokens_per_gpu": 20,
            "learning_rate": 1e-2,
            "kl_coef": 0.01,
        }
        paths = {"model_name_or_path": str(self.folder), "output_dir": str(folder / "out")}
        self.config = replace(chain_config(**options | changes), **paths)
        found = newest(self.config.output_path)
        self.settings = replace(flow_settings(window=3), checkpoint=str(found[0]) if found else "")
        self.controller = RunController(self.settings, 20.0, InProcessWorker.connect, self.config.scheduling)
        self.digests_read: dict[str, str] = {}
        self.link = InProcessRun(self.controller)
        self.worker = self.link.run(self._start())

    def questions(self) -> list[Question]:
        return [Question(np.array([n], np.int32), {"input": name}) for n, name in enumerate("abcde")]

    async def _start(self) -> InProcessWorker:
        config = SimpleNamespace(model_path=str(self.folder), max_sequences=8)
        worker = InProcessWorker(DrawingEngine.start(config, self.settings))
        await self.controller.register(
            WorkerInfo("g0", "generation", 8, worker.engine.kv_cache_tokens), worker
        )
        return worker


def darkness(sample):
    picture = np.asarray(with_decoded_picture(sample)["picture"])
    return float(picture.mean() / 255)


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
