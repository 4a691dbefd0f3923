"""A whole run that draws, in one process: controller, the real engine, trainer and publisher, with a simple reward."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from fake_chain import Chain, chain_config
from tiny_flow import NOISE_LEVEL, NUM_STEPS, flow_settings, save_tiny_flow_model

from async_grpo.cluster.controller import RunController
from async_grpo.config.flow_prompts import TextPrompts
from async_grpo.config.lora import lora_settings
from async_grpo.experience.dataset import Question
from async_grpo.inference.drawing.engine import DrawingEngine
from async_grpo.messages import WorkerInfo
from async_grpo.rewards.adapter.pictures import with_decoded_picture
from async_grpo.testing import InProcessRun, InProcessWorker
from async_grpo.training.checkpoint_folder import newest


class FlowChain(Chain):
    """A `Chain` whose engines draw with a tiny flow-matching model. `flow` has further fields of `FlowSettings`."""

    engine_class = DrawingEngine
    max_pictures = 8  # pictures that the engine draws at once

    def __init__(self, folder: Path, steps: int, flow: dict | None = None, **changes) -> None:
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
        self.settings = replace(
            flow_settings(**{"window": 3} | (flow or {})),
            checkpoint=str(found[0]) if found else "",
            lora=lora_settings(self.config, str(self.folder)),
        )
        self.controller = RunController(self.settings, 20.0, InProcessWorker.connect, self.config.scheduling)
        self.digests_read: dict[str, str] = {}
        self.link = InProcessRun(self.controller)
        self.worker = self.link.run(self._start())

    def questions(self) -> list[Question]:
        return [Question(np.array([n], np.int32), {"input": name}) for n, name in enumerate("abcde")]

    async def _start(self) -> InProcessWorker:
        config = SimpleNamespace(model_path=str(self.folder), max_sequences=self.max_pictures)
        worker = InProcessWorker(self.engine_class.start(config, self.settings))
        await self.controller.register(
            WorkerInfo("g0", "generation", 8, worker.engine.kv_cache_tokens), worker
        )
        return worker


class TextChain(FlowChain):
    """A `Chain` whose engines draw from texts, with a tiny pipeline."""

    def questions(self) -> list[Question]:
        texts = ["a red ball", "two blue boxes", "a small green house on a hill"]
        prompts = TextPrompts()
        return [
            Question(np.array(prompts.prompt_tokens({"input": text}, 4096), np.int32), {"input": text})
            for text in texts
        ]


def darkness(sample):
    picture = np.asarray(with_decoded_picture(sample)["picture"])
    return float(picture.mean() / 255)
