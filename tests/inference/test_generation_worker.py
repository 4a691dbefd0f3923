"""`GenerationWorker` around a scripted vLLM engine: whose salt a request carries, what the engine is started with."""

import asyncio
import inspect
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from safetensors.torch import save
from tiny_policy import SETTINGS

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logprobs import FlatLogprobs
from vllm.platforms import current_platform
from vllm.v1.engine import PauseMode
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import SLEEP_TAGS
from vllm.v1.worker.cpu_worker import CPUWorker

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.inference import memory_cures
from async_grpo.inference.config import REFUSED_ENGINE_OPTIONS, EngineConfig
from async_grpo.inference.engine_arguments import engine_arguments
from async_grpo.inference.generation_worker import GenerationWorker
from async_grpo.inference.requests import EngineRequest, TokenTimeline
from async_grpo.inference.vllm_edges.cpu_drafts import DRAFT_ARGUMENTS
from async_grpo.messages import Truncation
from async_grpo.types import GREEDY, Sampling
from async_grpo.weights.config import TRANSPORTS

MODEL = Path(__file__).resolve().parents[2] / "async_grpo" / "data" / "tiny-model"


class ScriptedLLM:
    """In place of vLLM's `AsyncLLM`: answers with one token, waits while it is paused, logs what it is asked."""

    errored = False

    def __init__(self, fails: str = "") -> None:
        self.fails, self.log = fails, []
        self.salts: list[str] = []
        self.running = asyncio.Event()
        self.running.set()

    async def generate(self, prompt, params, request_id, lora_request):
        self.salts.append(prompt["cache_salt"])
        await self.running.wait()
        output = SimpleNamespace(
            token_ids=[1],
            finish_reason="stop",
            stop_reason=None,
            logprobs=FlatLogprobs([0], [1], [1], [-0.5], [1], [None]),
            weight_versions=[SimpleNamespace(version=prompt["cache_salt"].split("/")[1], start=0, end=1)],
        )
        yield SimpleNamespace(outputs=[output])

    async def collective_rpc(self, method):
        return [({}, {})] if method == "fingerprints" else [{}]

    async def pause_generation(self, mode, clear_cache):
        self.running.clear()

    async def resume_generation(self):
        self.running.set()

    def __getattr__(self, name):
        async def step(*args, **kwargs):
            self.log.append(name)
            if name == self.fails:
                raise RuntimeError(f"{name} failed")

        return step


def worker(fails: str = "") -> GenerationWorker:
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "")
    return GenerationWorker(ScriptedLLM(fails), tokenizer, SETTINGS, TokenTimeline(), stall_s=0.2)


async def one(worker: GenerationWorker):
    (completion,) = [c async for c in worker.complete(np.array([2, 3], np.int32), {0: 5})]
    return completion


async def update_in_one(worker: GenerationWorker, version: int, meanwhile) -> None:
    async def at_the_chunk(request) -> None:
        await meanwhile()

    worker.engine.update_weights = at_the_chunk
    await worker.update(version, [memoryview(save({}))])


async def update_in_steps(worker: GenerationWorker, version: int, meanwhile) -> None:
    await worker.pause(version)
    await worker.start_weight_update()
    await meanwhile()
    await worker.finish_weight_update()
    await worker.resume(version)


@pytest.mark.parametrize("update", [update_in_one, update_in_steps])
async def test_a_request_of_the_time_of_a_transfer_carries_the_salt_of_the_weights_that_serve_it(update):
    """With the old salt it would find, and leave, prefixes of the old policy under the new one."""
    engine = worker()
    asked: list[asyncio.Task] = []

    async def ask() -> None:
        asked.append(asyncio.ensure_future(one(engine)))
        await asyncio.sleep(0.01)

    for version in (4, 5):
        await update(engine, version, ask)
    await one(engine)
    completions = await asyncio.gather(*asked)
    assert engine.engine.salts == ["0/4", "0/5", "0/5"]
    assert [completion.versions.tolist() for completion in completions] == [[4], [5]]
    assert 0.02 <= engine.progress()["paused_s"] < 1.0
    assert engine.progress()["paused_s"] == 0.0  # of the time since the last call


async def test_after_another_start_of_the_trainer_no_prefix_of_the_same_version_is_found_again():
    engine = worker()
    await engine.update(4, [])
    await one(engine)
    assert await engine.begin_anew()
    await engine.update(4, [])  # trained again from a checkpoint before it: other weights
    await one(engine)
    assert engine.engine.salts == ["0/4", "1/4"]
    await engine.pause(5)
    assert not await engine.begin_anew()  # the trainer died in the middle of an update
    await engine.resume(5)
    assert not await engine.begin_anew()


async def test_a_receipt_says_of_each_tensor_whether_it_was_read_back_and_whether_it_is_in_use():
    """A place that differs after the first update, and one that the engine does not have, cannot be read."""
    q, norm, expert, packed = names = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.norm.weight",
        "model.layers.0.mlp.experts.5.up_proj.weight",
        "model.layers.0.moe.gate.weight",
    )
    places = {"model.layers.0.self_attn": 1, "model": 2, "model.layers.0.moe": 3}
    arrived = [places | {"model.layers.0.moe": 4}, places | {"model.layers.0.moe": 4, "model": 5}]
    engine = worker()

    async def collective_rpc(method):
        if method == "fingerprints":
            return [(places, arrived.pop(0))]
        return [{name: ("float32", [2], 7, True, False) for name in names}]

    engine.engine.collective_rpc = collective_rpc
    first, second = await engine.update(0, []), await engine.update(1, [])
    for manifest in (first, second):
        assert {name for name in names if manifest[name].is_read_back} == {q, norm}
        assert manifest[packed].in_use and manifest[expert].in_use  # the canary's business
    assert first[norm].in_use and not second[norm].in_use


async def test_an_engine_whose_update_failed_refuses_every_request():
    broken = worker(fails="start_weight_update")
    with pytest.raises(RuntimeError, match="start_weight_update failed"):
        await broken.update(7, [])
    with pytest.raises(WorkerLost, match="its update to policy version 7 did not finish"):
        await one(broken)
    assert broken.engine.running.is_set()  # resumed all the same


async def test_an_engine_whose_transfer_did_not_finish_resumes_only_to_refuse():
    engine = worker()
    await engine.pause(3)
    await engine.resume(3)
    with pytest.raises(WorkerLost, match="its update to policy version 3 did not finish"):
        await one(engine)


async def test_an_engine_that_makes_no_token_though_it_should_is_given_up_unless_its_weights_are_on_their_way():
    engine = worker()
    failure = asyncio.ensure_future(engine.until_failure(0.01))
    await one(engine)
    await asyncio.sleep(0.3)  # without work
    engine.engine.running.clear()
    begun = time.monotonic()
    request = asyncio.ensure_future(one(engine))
    await asyncio.sleep(0.1)
    await engine.pause(3)
    await asyncio.sleep(0.3)
    await engine.finish_weight_update()
    assert not failure.done()
    await engine.resume(3)
    await request
    engine.engine.running.clear()
    request = asyncio.ensure_future(one(engine))
    reason = await asyncio.wait_for(failure, 5)
    assert "made no token for 0 s (--engine-stall-s 0.2), with 1 requests" in reason
    assert time.monotonic() - begun > 0.55
    request.cancel()
    with pytest.raises(WorkerLost, match="made no token"):
        await one(engine)


def arguments(options="", **changes):
    config = EngineConfig(model_path=str(MODEL), engine_options=options)
    return engine_arguments(config, replace(SETTINGS, **changes), "")


def test_a_float32_head_of_the_run_reaches_vllm():
    assert arguments(float32_head=True).hf_overrides == {"head_dtype": "float32"}
    assert arguments().hf_overrides == {} and arguments().logprobs_mode == "processed_logprobs"


def test_further_options_reach_vllm_if_it_has_them_and_the_run_does_not_set_them():
    assert arguments("block-size=64").block_size == 64
    with pytest.raises(ConfigurationError, match="no such argument; did you mean block_size"):
        arguments("block_sice=32")
    with pytest.raises(ConfigurationError, match="the run sets seed"):
        arguments("seed=1")


def test_on_the_cpu_prompts_are_shared_and_the_cache_is_as_large_as_its_sequences_need(monkeypatch):
    """A token of the tiny model takes 2 x 4 layers x 2 heads x 32 numbers x 4 bytes."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    made = arguments(max_total_tokens=100)
    assert made.block_size == 32
    assert made.kv_cache_memory_bytes == 1024 * (4 + 1) * 32 * 2048  # 4 blocks hold 100 tokens
    assert arguments(max_total_tokens=100_000).kv_cache_memory_bytes == 1 << 30
    given = arguments("kv_cache_memory_bytes=7000000,block_size=128")
    assert given.kv_cache_memory_bytes == 7_000_000 and given.block_size == 128
    assert arguments("num_gpu_blocks_override=9").kv_cache_memory_bytes is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert arguments(max_total_tokens=100).kv_cache_memory_bytes == 3 << 30


@pytest.mark.parametrize("name", REFUSED_ENGINE_OPTIONS)
def test_options_that_would_make_log_probs_mean_something_else_are_refused_and_exist(name):
    with pytest.raises(ConfigurationError, match=f"--engine-options {name}=5: .*; leave it out"):
        EngineConfig(model_path=str(MODEL), engine_options=f"{name}=5")
    assert name in {field.name for field in fields(AsyncEngineArgs)}, "vLLM has another name for it now"


@pytest.mark.parametrize(
    "assignment",
    [
        "disable_log_stats=false",
        "enable_lora=False",
        "override_generation_config={}",
        "runner=generate",
        "runner=auto",
        "pipeline_parallel_size=1",
        "data-parallel-size=1",
    ],
)
def test_refused_options_may_say_what_vllm_does_anyway(assignment):
    assert arguments(assignment)
    with pytest.raises(ConfigurationError, match="leave it out"):
        EngineConfig(model_path=str(MODEL), engine_options=f"{assignment.partition('=')[0]}=true")


@pytest.mark.parametrize("name", DRAFT_ARGUMENTS)
def test_drafts_are_refused_on_the_cpu_alone(name, monkeypatch):
    assert name in {field.name for field in fields(AsyncEngineArgs)}
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    with pytest.raises(ConfigurationError, match=rf"{name}=4: vLLM 0.32 on the CPU .* \(the run's: 0.7\)"):
        arguments(f"{name}=4", temperature=0.7)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    assert arguments("spec_tokens=4").spec_tokens == 4


@pytest.mark.parametrize("name", DRAFT_ARGUMENTS)
def test_drafts_are_refused_with_a_rule_that_keeps_only_probable_tokens(name, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ConfigurationError, match=rf"{name}=4: log-probs of drafted tokens .*--top-p"):
        arguments(f"{name}=4", truncation=Truncation(top_p=0.9))


def test_the_sampling_defaults_of_a_model_folder_change_no_request():
    """Those of its generation_config.json: vLLM takes the end tokens from it, which the run knows."""
    defaults = {"temperature": 0.1, "top_k": 1, "top_p": 0.2, "min_p": 0.5, "repetition_penalty": 3.0}
    params = EngineRequest.of(SETTINGS, np.arange(4), 0, 0).params
    before = {name: getattr(params, name) for name in (*defaults, "logit_bias", "bad_words", "min_tokens")}
    params.update_from_generation_config({**defaults, "eos_token_id": [3, 5]}, 3)
    assert {name: getattr(params, name) for name in before} == before
    assert before["temperature"] == SETTINGS.temperature and before["top_k"] in (0, -1)
    assert (before["top_p"], before["min_p"], before["repetition_penalty"]) == (1.0, 0.0, 1.0)


def test_the_rule_of_the_run_keeps_probable_tokens_in_every_request_but_greedy_ones():
    settings = replace(SETTINGS, truncation=Truncation(top_p=0.9, top_k=20, min_p=0.05))
    for sampling in (None, Sampling(temperature=0.3)):
        params = EngineRequest.of(settings, np.arange(4), 0, 0, sampling).params
        assert (params.top_p, params.top_k, params.min_p) == (0.9, 20, 0.05)
    greedy = EngineRequest.of(settings, np.arange(4), 0, 0, GREEDY).params
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)


def test_the_engine_side_of_every_transport_is_known_to_vllm():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, transport in TRANSPORTS.items():
        backend = arguments(transport=name).weight_transfer_config.backend
        assert backend == transport.engine_backend and backend in WeightTransferEngineFactory._registry


async def test_an_engine_that_died_for_lack_of_memory_says_so_and_what_to_change():
    engine = worker()

    def generate(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    engine.engine.generate = generate
    engine.engine.errored = True
    with pytest.raises(
        WorkerLost,
        match="the vLLM engine died: out of memory in a step of the engine, with 1 unfinished requests: lower "
        "--max-num-seqs, .*Tried to allocate 2.00 GiB",
    ):
        await one(engine)


async def test_the_lack_of_memory_of_an_engine_without_requests_comes_from_the_log(monkeypatch):
    engine = worker()
    engine.engine.errored = True
    assert await engine.until_failure() == "the vLLM engine's processes died"
    monkeypatch.setattr(memory_cures, "reason_in_log", lambda: "torch.OutOfMemoryError: CUDA out of memory")
    reason = await engine.until_failure()
    assert reason.startswith("the vLLM engine's processes died; out of memory in a step of the engine")


class SleepingLLM(ScriptedLLM):
    """Also notes arguments and requests."""

    async def generate(self, *arguments, **named_arguments):
        self.log.append("generate")
        async for output in super().generate(*arguments, **named_arguments):
            yield output

    async def sleep(self, level, mode):
        self.log.append(f"sleep {level} {mode}")

    async def wake_up(self, tags):
        self.log.append(f"wake {tags}")
        if self.fails == "wake_up":
            raise RuntimeError("CUDA out of memory")

    async def pause_generation(self, mode, clear_cache):
        self.log.append("pause")
        await super().pause_generation(mode, clear_cache)

    async def resume_generation(self):
        self.log.append("resume")
        await super().resume_generation()


async def test_a_sleeping_engine_wakes_weights_first_and_its_cache_last_and_serves_who_waited():
    engine = worker()
    engine.engine = SleepingLLM()
    engine._sleep_mode._engine = engine.engine
    await engine.sleep(2)
    request = asyncio.create_task(one(engine))
    await asyncio.sleep(0.05)
    assert engine.engine.log == ["sleep 2 wait"], "no request reaches an engine that sleeps"
    assert not await engine.begin_anew()  # it has no weights for another trainer
    await engine.update(7, [])
    await asyncio.wait_for(request, 5)
    update = ["start_weight_update", "finish_weight_update"]
    expected = [
        "sleep 2 wait",
        "wake ['weights']",
        "pause",
        *update,
        "wake ['kv_cache']",
        "resume",
        "generate",
    ]
    assert [event for event in engine.engine.log if event != "collective_rpc"] == expected
    assert engine.engine.salts == ["0/7"]
    await engine.update(8, [])  # awake: as usual
    assert engine.engine.log[len(expected) :] == ["pause", *update, "resume"]


async def test_an_engine_that_cannot_wake_up_refuses_all_requests():
    engine = worker()
    engine.engine = SleepingLLM("wake_up")
    engine._sleep_mode._engine = engine.engine
    await engine.sleep(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        await engine.update(7, [])
    with pytest.raises(WorkerLost, match="it did not wake up"):
        await one(engine)


async def test_an_engine_whose_cache_finds_no_memory_when_it_wakes_refuses_all_requests():
    engine = worker()
    engine.engine = SleepingLLM()
    engine._sleep_mode._engine = engine.engine
    await engine.sleep(1)

    async def wake_up(tags):
        if tags == ["kv_cache"]:
            raise RuntimeError("CUDA out of memory")

    engine.engine.wake_up = wake_up
    with pytest.raises(RuntimeError, match="out of memory"):
        await engine.update(7, [])
    with pytest.raises(WorkerLost, match="it did not wake up"):
        await one(engine)


def test_vllm_s_sleep_mode_is_as_the_worker_calls_it():
    assert {"level", "mode"} <= inspect.signature(AsyncLLM.sleep).parameters.keys()
    assert "tags" in inspect.signature(AsyncLLM.wake_up).parameters
    assert "wait" in get_args(PauseMode) and set(SLEEP_TAGS) == {"weights", "kv_cache"}
    assert "enable_sleep_mode" in inspect.signature(AsyncEngineArgs).parameters
    # If this fails, the CPU engine may have a sleep mode now: remove the refusals of --engine-sleep without a GPU
    assert "not supported on CPU" in inspect.getsource(CPUWorker.sleep)
