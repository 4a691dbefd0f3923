"""A whole run in one process, without vLLM, Ray or torchrun: controller, fake engines, verifiers, trainer, publisher."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tiny_policy import SETTINGS, save_tiny_model

from async_grpo.cluster.controller import RunController
from async_grpo.cluster.make_trainer import make_trainer
from async_grpo.config.run import RunConfig
from async_grpo.experience.config import NO_FACTS
from async_grpo.experience.dataset import Question
from async_grpo.inference.config import engine_class
from async_grpo.inference.logprob_worker import LogprobWorker
from async_grpo.messages import WorkerInfo
from async_grpo.rewards.pool import VerifierPool
from async_grpo.testing import FakeVerification, InProcessRun, InProcessWorker
from async_grpo.training.checkpoint_folder import newest
from async_grpo.training.distributed import distributed_run
from async_grpo.types import GENERATION

STEPS, GROUPS, MEMBERS = 3, 2, 4


def chain_config(**changes: Any) -> RunConfig:
    """Three steps of two groups of four."""
    settings: dict[str, Any] = {
        "model_name_or_path": "m",
        "data_path": "d",
        "num_training_batches": STEPS,
        "batch_size": GROUPS,
        "samples_per_question": MEMBERS,
        "max_tokens_per_gpu": 256,
        "max_generation_tokens": 16,
        "experience_timeout_s": 20.0,
        "infinite_sampler_seed": 0,
        "learning_rate": 1e-3,
        "num_warmup_steps": 0,
    }
    return RunConfig(**settings | changes)


class PoolVerification:
    """`Verification` by a `VerifierPool` of this machine, with one reward in a process of its own."""

    def __init__(self, reward: str) -> None:
        self.pool = VerifierPool.from_registry(reward)
        self.start, self.verify, self.close = self.pool.start, self.pool.verify, self.pool.close

    async def take_stats(self) -> dict[str, Any]:
        return {"verifiers": self.pool.take_stats()}


class Chain:
    """A controller in a thread with some engines, and a trainer in this one."""

    images_folder: Path | None = None  # folder of the run's images; None if the model reads none

    def __init__(
        self,
        folder: Path,
        engines: int = 1,
        engine: type | str = "fake",
        config: RunConfig | None = None,
        transport: str = SETTINGS.transport,
        num_ranks: int = 1,
        teacher: Path | None = None,
        **settings: Any,
    ) -> None:
        self.num_ranks = num_ranks
        self.folder, self.lines = save_tiny_model(folder / "model"), []
        paths = {"model_name_or_path": str(self.folder), "output_dir": str(self.folder / "out")}
        self.config = replace(config or chain_config(), **paths)
        found = newest(self.config.output_path)  # of a run that was there before
        checkpoint = str(found[0]) if found else ""
        roles = self.config.logprob_roles if teacher else ()
        shared = replace(
            SETTINGS, **{"logprob_roles": roles, "deterministic": self.config.deterministic, **settings}
        )
        self.settings = replace(SETTINGS, **settings, transport=transport, checkpoint=checkpoint)
        self.controller = RunController(shared, 20.0, InProcessWorker.connect, self.config.scheduling)
        self._shared = shared
        self.digests_read: dict[str, str] = {}  # digests of the run's input files, for its checkpoints
        self.link = InProcessRun(self.controller)
        kind = engine_class(engine) if isinstance(engine, str) else engine
        self.workers = [self.join(f"g{number}", kind) for number in range(engines)]
        if teacher:
            self.link.run(self._join_teacher(teacher, shared))

    async def _join_teacher(self, folder: Path, shared: Any) -> None:
        config = SimpleNamespace(model_path=folder, max_tokens_per_gpu=256, max_wait_s=0.0)
        worker = InProcessWorker(LogprobWorker.start(config, shared))
        info = WorkerInfo("t0", "teacher", 1000, worker.engine.kv_cache_tokens)
        await self.controller.register(info, worker)

    def join(self, worker_id: str, kind: Any, role: str = GENERATION) -> InProcessWorker:
        async def start() -> InProcessWorker:
            config = SimpleNamespace(model_path=self.folder, max_tokens_per_gpu=256, max_wait_s=0.0)
            worker = InProcessWorker(kind.start(config, self._shared))
            info = WorkerInfo(worker_id, role, 2 * MEMBERS, worker.engine.kv_cache_tokens)
            await self.controller.register(info, worker)
            return worker

        return self.link.run(start())

    def write_line(self, line: dict[str, Any]) -> None:
        self.lines.append(line)

    def questions(self) -> list[Question]:
        rows = [{"input": f"q{n}", "answer": "x", "difficulty": 1 + n % 2} for n in range(4)]
        return [Question(np.array([5 + n, 6], np.int32), row) for n, row in enumerate(rows)]

    def train(self, verification: Callable[[], Any] = FakeVerification) -> list[dict[str, Any]]:
        """The metrics lines of the run; questions have a `difficulty` of 1 or 2."""
        questions = self.questions()
        folder = Path(self.settings.checkpoint) if self.settings.checkpoint else None
        given = self.config, NO_FACTS, self.num_ranks, questions, verification, folder
        self.link.run(self.controller.start_batcher(*given, images_folder=self.images_folder))

        def save(partial: Path, step: int) -> Callable[[], Any]:
            return self.link.begin(self.controller.save_experience(partial, step)).result

        try:
            with distributed_run("cpu", timeout_s=30) as ranks:
                given = self.config, self.settings, ranks, self.link, self.link
                self.trainer = make_trainer(*given, save_experience=save, digests_read=self.digests_read)
                self.trainer.write = self.write_line
                self.trainer.run()
        finally:
            self.link.run(self.controller.stop())
        return self.lines
