"""A worker's actor names a lack of memory, and tells its memory beside the plan."""

import asyncio
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save
from tiny_policy import SETTINGS

from async_grpo.cluster import worker_actors, worker_memory
from async_grpo.cluster.worker_actors import GenerationActor, LogprobActor
from async_grpo.cluster.worker_memory import WorkerMemory
from async_grpo.config.run import WorkerConfig
from async_grpo.data import TINY_MODEL
from async_grpo.errors import OutOfMemory
from async_grpo.metrics.memory_report import ADDED, PEAK, PLANNED
from async_grpo.modeling.load import load_config, model_fingerprint
from async_grpo.processes import out_of_memory
from async_grpo.protocols import WeightPackage

LACK = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.fixture
def settings():
    return replace(
        SETTINGS,
        model_fingerprint=model_fingerprint(TINY_MODEL),
        vocab_size=load_config(TINY_MODEL).vocab_size,
        max_total_tokens=64,
        samples_in_flight=8,
    )


def config(mode="generation", **options):
    return WorkerConfig(mode=mode, model_path=str(TINY_MODEL), engine="fake", **options)


def failing(*_, **__):
    raise LACK


class Starting:
    """In place of an engine's class: it fails with this error."""

    def __init__(self, error):
        self.error = error

    def start(self, config, settings):
        raise self.error


@pytest.mark.parametrize(
    ("actor_class", "options", "expected"),
    [
        (
            GenerationActor,
            {},
            r"while an engine started, with about 137\.. MB for weights and KV cache: lower --max-num-seqs \(8 now\)",
        ),
        (
            LogprobActor,
            {"mode": "logprob"},
            "while a reference worker loaded its model: lower --max-tokens-per-gpu",
        ),
    ],
)
async def test_at_the_start(monkeypatch, settings, actor_class, options, expected):
    monkeypatch.setattr(worker_actors, "_worker_class", lambda config: Starting(LACK))
    with pytest.raises(OutOfMemory, match=f"{expected}.*planned for this .*Tried to allocate 2.00 GiB"):
        await actor_class().start(config(**options), settings)


async def test_at_the_start_of_an_engine_that_writes_the_cause_to_the_log_alone(monkeypatch, settings):
    failure = RuntimeError("Engine core initialization failed. See root cause above.")
    monkeypatch.setattr(worker_actors, "_worker_class", lambda config: Starting(failure))
    with pytest.raises(RuntimeError, match="Engine core initialization failed"):
        await GenerationActor().start(config(), settings)
    monkeypatch.setattr(
        out_of_memory, "reason_in_log", lambda: "ValueError: No available memory for the cache blocks"
    )
    with pytest.raises(OutOfMemory, match="No available memory for the cache blocks"):
        await GenerationActor().start(config(), settings)


async def test_in_a_weight_update_and_in_each_step_of_one(monkeypatch, settings, tmp_path):
    (tmp_path / "weights").write_bytes(save({"weight": torch.zeros(1)}))
    actor = GenerationActor()
    await actor.start(config(), settings)
    try:
        monkeypatch.setattr(actor._engine, "update", failing)
        package = WeightPackage(
            version=3,
            manifest={},
            chunks=[tmp_path / "weights"],
            canary_texts=[],
            canary_logprobs=None,
            tolerance=1.0,
            for_late=False,
        )
        with pytest.raises(
            OutOfMemory, match="while a worker loaded the weights of policy version 3: lower --gpu-mem"
        ):
            await actor.update_weights(package)
        actor._engine.receive_weights = failing
        with pytest.raises(
            OutOfMemory, match="in receive_weights, a step of a weight update: lower --gpu-memory"
        ):
            await actor.transfer("receive_weights", {})
    finally:
        await actor.close()


async def test_while_an_engine_falls_asleep(monkeypatch, settings):
    actor = GenerationActor()
    await actor.start(config(), settings)
    try:
        monkeypatch.setattr(actor._engine, "sleep", failing)
        with pytest.raises(
            OutOfMemory, match="moved its weights to main memory, to sleep: use --engine-sleep 2"
        ):
            await actor._handlers["sleep"](1)
    finally:
        await actor.close()


def test_an_engine_whose_weights_are_in_no_file_has_no_plan(monkeypatch, settings, tmp_path):
    """vLLM's load_format=dummy needs no weights."""
    shutil.copy(TINY_MODEL / "config.json", tmp_path)
    memory = WorkerMemory(WorkerConfig(mode="generation", model_path=str(tmp_path), engine="fake"), settings)
    assert memory.planned_bytes == 0 and memory.entry(0)[PLANNED] == 0
    with pytest.raises(OutOfMemory, match="while an engine started: lower"), memory.naming_start():
        raise LACK


def test_small_children_of_a_worker_do_not_hide_what_it_takes(monkeypatch, settings):
    memory = WorkerMemory(config(), settings)
    memory._baseline_bytes = 500_000_000
    peaks = {os.getpid(): 2_000_000_000, 7: 10_000_000}
    monkeypatch.setattr(worker_memory, "descendants", lambda root: [7])
    monkeypatch.setattr(
        worker_memory, "peak_resident_bytes_of", lambda process_ids: sum(peaks[pid] for pid in process_ids)
    )
    entry = memory.entry(0)
    assert (entry[PEAK], entry[ADDED]) == pytest.approx((2.01, 1.5))


async def test_an_engine_tells_its_memory_beside_the_plan(settings):
    actor = GenerationActor()
    await actor.start(config(), settings)
    try:
        memory = actor._handlers["progress"]()["memory"]
        assert 0 <= memory[ADDED] < memory[PEAK]
        assert memory[PLANNED] == pytest.approx(
            0.137, abs=0.01
        )  # 0.8 M parameters and the smallest KV cache, 128 MiB
        actor._engine.peak_gpu_bytes = 7e9
        assert actor._progress()["memory"][PEAK] == actor._progress()["memory"][ADDED] == 7
    finally:
        await asyncio.wait_for(actor.close(), 10)
