"""A package without weights asks a worker what it computes with the weights that it has, and changes nothing."""

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_policy import SETTINGS

from async_grpo.cluster.worker_actors import GenerationActor
from async_grpo.config.run import WorkerConfig
from async_grpo.data import TINY_MODEL
from async_grpo.errors import OutOfMemory
from async_grpo.modeling.load import load_config, model_fingerprint
from async_grpo.protocols import WeightPackage
from async_grpo.testing.engine import InProcessWorker
from async_grpo.weights.package import SELF_TEST

TEXT = np.arange(5, 25, dtype=np.int32)
QUESTION = WeightPackage(
    version=SELF_TEST,
    manifest={},
    chunks=[],
    canary_texts=[TEXT],
    canary_logprobs=np.zeros(len(TEXT), np.float32),
    tolerance=1.0,
    for_late=False,
)


@asynccontextmanager
async def started_actor():
    settings = replace(
        SETTINGS,
        model_fingerprint=model_fingerprint(TINY_MODEL),
        vocab_size=load_config(TINY_MODEL).vocab_size,
        max_total_tokens=64,
        samples_in_flight=8,
    )
    actor = GenerationActor()
    await actor.start(WorkerConfig(mode="generation", model_path=str(TINY_MODEL), engine="fake"), settings)
    try:
        yield actor
    finally:
        await actor.close()


async def refuse_update(*_):
    raise AssertionError("a question is no update")


async def test_an_actor_and_a_worker_of_a_test_answer_with_their_own_log_probs_and_load_nothing():
    async with started_actor() as actor:
        actor._engine.update = refuse_update
        expected = await actor._engine.canary(TEXT)
        assert np.abs(expected[1:]).min() > 0
        worker = InProcessWorker(actor._engine)
        for answer in (await actor.update_weights(QUESTION), await worker.load(QUESTION)):
            received, logprobs = answer
            assert received == {} and np.array_equal(logprobs, expected)
        assert actor._version is None


async def test_a_lack_of_memory_for_the_answer_is_named():
    async def fail(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    async with started_actor() as actor:
        actor._engine.canary = fail
        expected = "while a worker computed log-probs of fixed texts: lower --gpu-mem"
        with pytest.raises(OutOfMemory, match=expected):
            await actor.update_weights(QUESTION)
