"""The whole chain without vLLM, Ray or torchrun, in one process: controller, verifiers, trainer and weight publishing."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import VOCAB, save_tiny_model

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.cluster.controller import RunController
from async_grpo.errors import ConfigurationError, RunFailed, WeightsDidNotLand
from async_grpo.experience.config import NO_FACTS, BatchConfig
from async_grpo.experience.dataset import Question
from async_grpo.generation.engines import engine_class
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel, named_full_tensors, named_weights
from async_grpo.protocols import Verification
from async_grpo.rewards.pool import VerifierPool
from async_grpo.testing import (
    FakeEngine,
    FakeVerification,
    InProcessExperience,
    InProcessLink,
    InProcessWorker,
    LoopThread,
)
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.canary import canary_logprobs
from async_grpo.training.checkpoint import CheckpointWriter
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import distributed_run
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy
from async_grpo.training.trainer import Progress, Trainer
from async_grpo.types import SharedRunSettings, WorkerInfo
from async_grpo.weights.publisher import Canary, Publisher

STEPS, GROUPS, MEMBERS = 3, 2, 4
SETTINGS = SharedRunSettings(
    run_name="chain",
    model_fingerprint="",
    vocab_size=VOCAB,
    dtype="float32",
    temperature=1.0,
    stop_token_ids=(3,),
    max_total_tokens=64,
    max_completion_tokens=16,
    samples_per_question=MEMBERS,
    transport="object_store",
    logprob_roles=(),
    seed=0,
)
CONFIG = BatchConfig(
    num_training_batches=STEPS,
    batch_size=GROUPS,
    samples_per_question=MEMBERS,
    max_tokens_per_gpu=256,
    experience_timeout_s=20.0,
    infinite_sampler_seed=0,
)


OWN = """
from async_grpo.testing import FakeEngine

class Counting(FakeEngine):
    asked = 0

    async def complete(self, prompt_token_ids, count, greedy=False):
        self.asked += count
        async for completion in super().complete(prompt_token_ids, count, greedy):
            yield completion

def last(members, sequences, tokens):
    return members[-1]
"""


class Lines(list):
    """`MetricsSink`."""

    write = list.append


class PoolVerification:
    """`Verification` by a `VerifierPool` of this machine, with one reward in a process of its own."""

    def __init__(self, folder: Path) -> None:
        (folder / "own.py").write_text("def length(sample):\n    return float(len(sample['completion']))\n")
        self.pool = VerifierPool.from_registry(f"{folder / 'own.py'}:length")
        self.start, self.verify, self.close = self.pool.start, self.pool.verify, self.pool.close

    async def take_stats(self) -> dict[str, Any]:
        return {"verifiers": self.pool.take_stats()}


class Chain:
    """A controller in a thread with some engines, and a trainer in this one."""

    def __init__(
        self,
        folder: Path,
        engines: int = 1,
        engine_class: type[FakeEngine] = FakeEngine,
        scheduling: str = "least_loaded",
    ) -> None:
        self.folder = save_tiny_model(folder / "model")
        self.loop, self.lines = LoopThread(), Lines()
        self.controller = RunController(SETTINGS, 1.0, InProcessWorker.connect, scheduling)
        self.link = InProcessLink(self.loop, self.controller)
        self.workers = [self.join(f"g{number}", engine_class) for number in range(engines)]

    def join(self, worker_id: str, engine_class: type[FakeEngine]) -> InProcessWorker:
        async def start() -> InProcessWorker:
            worker = InProcessWorker(engine_class.start(SimpleNamespace(model_path=self.folder), SETTINGS))
            info = WorkerInfo(worker_id, "generation", 2 * MEMBERS, worker.engine.kv_cache_tokens)
            await self.controller.register(info, worker, "")
            return worker

        return self.loop.run(start())

    def train(self, verification: Callable[[], Verification] = FakeVerification) -> Lines:
        questions = [Question(np.array([5 + n, 6], np.int32), {"input": f"q{n}"}) for n in range(4)]
        self.loop.run(self.controller.start_batcher(CONFIG, NO_FACTS, 1, questions, verification))
        try:
            with distributed_run("cpu", timeout_s=30) as ranks:
                self._trainer(ranks).run()
        finally:
            self.loop.run(self.controller.stop())
        return self.lines

    def _trainer(self, ranks: Any) -> Trainer:
        policy = PolicyModel(load_causal_lm(self.folder, "float32"))
        shard_policy(policy, ranks, dtype="float32", gradient_checkpointing=False)
        optimizer, scheduler = build_policy_optimizer(
            policy, OptimizerConfig(learning_rate=1e-3, num_warmup_steps=0), STEPS
        )
        canary = Canary(Canary.text(VOCAB, 16), canary_logprobs)
        return Trainer(
            policy=policy,
            accumulator=GradientAccumulator(
                policy, optimizer, scheduler, Objective(AlgorithmConfig()), ranks
            ),
            source=InProcessExperience(self.loop, self.controller),
            publisher=Publisher(self.link, named_weights, canary, torch.float32),
            metrics=self.lines,
            checkpoints=CheckpointWriter(self.folder / "out", self.folder, ranks),
            ranks=ranks,
            num_steps=STEPS,
            progress=Progress(),
        )


def test_three_steps_are_generated_scored_trained_and_published(tmp_path):
    chain = Chain(tmp_path)
    lines = chain.train(lambda: PoolVerification(tmp_path))
    assert [line["policy_version"] for line in lines] == [1, 2, 3]
    # The self-test (as they are, outside the layers, each of two layers), the first weights, and each step's
    assert chain.link.delivered == [-2] * 4 + [0, 1, 2, 3]
    for line in lines:
        assert line["samples_in_batch"] == line["num_reward_ok"] == GROUPS * MEMBERS
        assert line["grad_norm"] > 0 and math.isfinite(line["avg_loss"]) and line["staleness_max"] <= 1
        assert line["canary_error"] < 1e-5
    assert lines[0]["staleness_mean"] == 0
    assert (
        sum(stats["ok"] for line in lines for stats in line["verifiers"].values()) == STEPS * GROUPS * MEMBERS
    )
    assert (chain.folder / "out" / "hf_format").exists()


def test_an_engine_that_loses_a_tensor_does_not_pass_the_self_test(tmp_path):
    class Lossy(FakeEngine):
        async def update(self, version, chunks):
            kept = {name: tensor.clone() for name, tensor in named_full_tensors(self._model._policy)}
            manifest = await super().update(version, chunks)
            lost = {
                n: kept[n] if n == "model.norm.weight" else t
                for n, t in named_full_tensors(self._model._policy)
            }
            await self._model.load_weights(lost.items())
            return manifest

    with pytest.raises(WeightsDidNotLand, match="the start-up self-test"):
        Chain(tmp_path, engine_class=Lossy).train()


def test_the_loss_of_an_engine_in_the_middle_of_its_groups_costs_no_sample(tmp_path):
    class Dying(FakeEngine):
        async def complete(self, prompt_token_ids, count, greedy=False):
            async for completion in super().complete(prompt_token_ids, count, greedy):
                yield completion
                if self.policy_version == 1 and not chain.workers[0]._lost:
                    chain.workers[0].die("killed in a test")

    chain = Chain(tmp_path, engines=2)
    chain.workers[0].engine.__class__ = Dying
    lines = chain.train()
    assert [line["samples_in_batch"] for line in lines] == [GROUPS * MEMBERS] * STEPS
    assert chain.workers[0]._lost
    members, _ = chain.loop.run(chain.controller.roll_call())[0]["generation"]
    assert [info.worker_id for info in members] == ["g1"]


def test_an_engine_and_a_scheduling_policy_of_the_user_s_own_are_one_file(tmp_path):
    (own := tmp_path / "own.py").write_text(OWN)
    chain = Chain(tmp_path, 2, engine_class(f"{own}:Counting"), f"{own}:last")
    assert len(chain.train()) == STEPS
    first, last = (worker.engine.asked for worker in chain.workers)
    assert last >= MEMBERS * GROUPS and first + last == STEPS * GROUPS * MEMBERS
    with pytest.raises(ConfigurationError, match="lacks start, complete, update, canary, progress"):
        engine_class(f"{own}:last")


def test_an_error_of_the_verifiers_ends_the_training_by_name(tmp_path):
    def broken(sample: dict) -> float:
        raise ZeroDivisionError("in the verifier")

    with pytest.raises(RunFailed, match="ZeroDivisionError: in the verifier"):
        Chain(tmp_path).train(lambda: FakeVerification(broken))
