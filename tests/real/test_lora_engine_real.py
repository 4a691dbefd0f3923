"""An adapter (LoRA) on a real vLLM engine: exact beside requests of the base, in flight, and proven at every sync."""

import asyncio
import itertools
import re
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from engine_thread import CANARY, MODEL, EngineThread, completions, hf_logprobs, weights
from long_tests import long_test
from peft_adapters import base_logprobs, error_of, lora_settings, move, new_adapter, peft_tensors
from real_fleet import LoraTrainer, RealFleet, restart
from safetensors.torch import save, save_file
from transformers import AutoModelForCausalLM

from async_grpo.errors import ConfigurationError, WeightsDidNotLand, WorkerLost
from async_grpo.messages import LoraSettings
from async_grpo.protocols import WeightPackage
from async_grpo.types import Completion
from async_grpo.weights.package import prove_landed, record
from async_grpo.weights.self_test import MIN_TOLERANCE

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("engine_environment")]
RANK, SCALING = 4, 2.0
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VERSIONS = itertools.count()


@pytest.fixture(scope="module")
def policy() -> torch.nn.Module:
    """The sample model with an adapter, by peft."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return new_adapter(model, RANK, SCALING, TARGETS)


@pytest.fixture(scope="module")
def engine(engine_environment, policy) -> Iterator[EngineThread]:
    lora = lora_settings(policy, RANK, SCALING)
    with closing(EngineThread(extension="faulty_lora.FaultyLora", lora=lora)) as thread:
        yield thread


@pytest.fixture(autouse=True)
def healthy(engine) -> Iterator[None]:
    """Every test begins and ends with an engine that does what it should."""
    yield
    fail_by(engine, "")
    engine.worker._broken_reason = None


def fail_by(engine: EngineThread, fault: str, module: str = "") -> None:
    engine.run(engine.worker.engine.collective_rpc("fail_by", args=(fault, module)))


def land(engine: EngineThread, policy: torch.nn.Module) -> None:
    """Send the adapter, and prove as the trainer does that it has landed. Raise WeightsDidNotLand or WorkerLost."""
    tensors, version = peft_tensors(policy), next(VERSIONS)
    received = engine.run(engine.worker.update(version, [memoryview(save(tensors))]))
    assert all(tensor.is_read_back for tensor in received.values())
    logprobs = engine.run(engine.worker.canary(CANARY))
    package = WeightPackage(
        version=version,
        manifest={name: record(tensor) for name, tensor in tensors.items()},
        chunks=[],
        canary_texts=[CANARY],
        canary_logprobs=hf_logprobs(policy, CANARY),
        tolerance=MIN_TOLERANCE,
    )
    prove_landed(package, "w0", (received, logprobs))


# -- exactness


def test_requests_of_the_adapter_and_of_the_base_in_one_batch_are_both_exact(engine, policy):
    """Without the edge `lora_on_cpu`, the base's log-probs would be wrong by more than a nat."""
    land(engine, policy)
    prompt, texts = CANARY[:12], (CANARY, CANARY[:31])
    answers, base = [], []

    async def mix() -> None:
        asking = asyncio.ensure_future(completions(engine, prompt, 6, 60))
        while not asking.done():
            asked = [engine.worker.canary(text, with_adapter=False) for text in texts]
            base.append(await asyncio.gather(*asked))
        answers.extend(await asking)

    engine.run(mix())
    assert len(base) > 3
    for logprobs in base:
        for text, own in zip(texts, logprobs, strict=True):
            assert np.abs(own - base_logprobs(policy, text)).max() < 1e-4
    assert max(error_of(answer, policy, prompt) for answer in answers) < 1e-4
    assert np.abs(base_logprobs(policy, CANARY) - hf_logprobs(policy, CANARY)).max() > 0.1


def logprobs_over_a_swap(old: dict, policy: torch.nn.Module, ids: np.ndarray, swap: int) -> np.ndarray:
    """Log-probs of `ids` where the first `swap` inputs were computed with the adapter `old`, and the others with peft's."""
    new = peft_tensors(policy)
    tensor = torch.tensor(ids, dtype=torch.int64)[None]
    with torch.no_grad():
        policy.load_state_dict(named_for(policy, old), strict=False)
        first = policy(tensor[:, :swap], use_cache=True)
        policy.load_state_dict(named_for(policy, new), strict=False)
        second = policy(tensor[:, swap:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], 1)[0].float() / 0.7
    chosen = logits.log_softmax(-1)[:-1].gather(-1, tensor[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()])


def named_for(policy: torch.nn.Module, tensors: dict) -> dict:
    """The names of `policy.state_dict()` instead of those of a file."""
    return {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors.items()}


def test_a_request_in_flight_goes_on_with_the_new_adapter_and_its_tokens_say_so(engine, policy):
    land(engine, policy)
    old, prompt = peft_tensors(policy), CANARY[:8]

    async def across() -> list[Completion]:
        asking = asyncio.ensure_future(completions(engine, prompt, 4, 150))
        while engine.worker.engine.get_num_unfinished_requests() < 4:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)
        await engine.worker.update(next(VERSIONS), [memoryview(save(peft_tensors(policy)))])
        return await asking

    move(policy, 0.02)
    crossed = 0
    for completion in engine.run(across()):
        versions = completion.versions
        changes = np.flatnonzero(np.diff(versions)) + 1
        assert list(versions) == sorted(versions) and len(changes) <= 1
        if not len(changes):
            continue  # ended by itself before the update
        crossed += 1
        ids = np.concatenate([prompt, completion.token_ids])
        # The step that made the first token of the new version computed the input before it
        swap = len(prompt) + int(changes[0]) - 1
        expected = logprobs_over_a_swap(old, policy, ids, swap)[len(prompt) :]
        assert np.abs(completion.logprobs - expected).max() < 1e-4
        all_old = logprobs_over_a_swap(old, policy, ids, len(ids) - 1)[len(prompt) :]
        assert np.abs(completion.logprobs - all_old).max() > 1e-3
    assert crossed
    assert engine.worker.progress()["paused_s"] > 0


def test_a_long_prompt_of_the_old_adapter_is_not_reused_under_the_new_one(engine, policy):
    """vLLM's prefix cache tells adapters apart by their name only, which stays."""
    prompt = np.concatenate([CANARY, CANARY[::-1], CANARY, CANARY[:16]])  # five blocks of 32 tokens
    assert len(prompt) > 128
    for _ in range(3):
        move(policy, 0.05)
        land(engine, policy)
        first, second = (engine.run(completions(engine, prompt, 1, 12))[0] for _ in range(2))
        assert max(error_of(answer, policy, prompt) for answer in (first, second)) < 1e-4


OTHER_ENGINES = {
    "two processes": (1e-4, {"processes": 2}),
    "bfloat16": (0.3, {"dtype": "bfloat16"}),
    "real model": (1e-4, {}),
    "real model in bfloat16": (0.3, {"dtype": "bfloat16"}),
}


@long_test("a minute per engine")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", OTHER_ENGINES)
def test_other_engines_apply_the_adapter_as_exactly_as_they_compute_the_base(kind, request):
    allowed, changes = OTHER_ENGINES[kind]
    folder = request.getfixturevalue("smollm2_folder") if "real model" in kind else MODEL
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    policy = new_adapter(model, 16, SCALING, TARGETS, size=0.02)
    tensors = peft_tensors(policy, getattr(torch, changes.get("dtype", "float32")))
    lora, prompt = lora_settings(policy, 16, SCALING), CANARY[:12]
    with closing(EngineThread(folder, lora=lora, **changes)) as other:
        received = other.run(other.worker.update(0, [memoryview(save(tensors))]))
        assert all(tensor.in_use and tensor.is_read_back for tensor in received.values())

        async def mix() -> tuple[list[Completion], np.ndarray]:
            asking = asyncio.ensure_future(completions(other, prompt, 4, 40))
            return await asking, await other.worker.canary(CANARY, with_adapter=False)

        answers, base = other.run(mix(), 180)
        with_adapter = other.run(other.worker.canary(CANARY))
    errors = with_adapter - hf_logprobs(policy, CANARY)
    base_errors = base - base_logprobs(policy, CANARY)
    assert np.abs(base_errors).max() < allowed and np.abs(errors).max() < allowed
    assert max(error_of(answer, policy, prompt) for answer in answers) < allowed
    assert np.sqrt(np.square(errors).mean()) < 2 * np.sqrt(np.square(base_errors).mean())
    assert np.abs(with_adapter - base).max() > 0.3


# -- proof


def test_twenty_healthy_syncs_are_accepted_and_each_moves_the_engine(engine, policy):
    before = engine.run(engine.worker.canary(CANARY))
    for seed in range(20):
        move(policy, 0.01 if seed % 2 else 1e-6, seed)
        land(engine, policy)
        after = engine.run(engine.worker.canary(CANARY))
        assert not np.array_equal(before, after)
        before = after


FAULTS = {
    "stale": "received, yet not in use: .*lora_",
    "zero": "received, yet not in use: .*lora_",
    "missing": "received, yet not in use: base_model.model.{module}.lora_A",
    "swapped": "received, yet not in use: base_model.model.{module}.lora_A",
    "unscaled": "received, yet not in use: base_model.model.{module}.lora_B",
    "scaled twice": "received, yet not in use: base_model.model.{module}.lora_B",
    "not computed": "its log-probs differ from the trainer's",
    "removed": "the received adapter was never applied",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_each_way_to_lose_an_adapter_is_refused_by_name(engine, policy, fault):
    modules = lora_settings(policy, RANK, SCALING).layers
    if fault == "swapped":  # only these are square; with the others the engine's own kernels refuse
        modules = [module for module in modules if module.endswith(("q_proj", "o_proj"))]
    for seed in range(10):
        module = modules[(seed * 7) % len(modules)]
        land(engine, policy)
        move(policy, 1e-6, seed)  # less than any canary would show in bfloat16
        fail_by(engine, fault, module)
        with pytest.raises(Exception, match=FAULTS[fault].format(module=module)) as caught:
            land(engine, policy)
        assert isinstance(caught.value, WeightsDidNotLand) or fault == "removed"
        fail_by(engine, "")
        engine.worker._broken_reason = None


def test_requests_that_do_not_name_the_adapter_are_noticed(engine, policy, monkeypatch):
    monkeypatch.setattr(engine.worker, "_adapter", None)
    with pytest.raises(WeightsDidNotLand, match="its log-probs differ from the trainer's"):
        land(engine, policy)


def test_a_base_that_has_changed_is_refused_by_name_until_it_is_as_it_was(engine, policy, model, tmp_path):
    tensors = weights(model)

    def load_base(**changed: torch.Tensor) -> None:
        """Load all weights of the base, because the engine loads parts of a layer only together."""
        save_file(tensors | changed, tmp_path / "base.safetensors")
        args = (str(tmp_path / "base.safetensors"),)
        engine.run(engine.worker.engine.collective_rpc("load_base", args=args))

    for name in sorted(tensors)[:: len(tensors) // 10][:10]:
        load_base(**{name: tensors[name] * 1.001 + 1e-6})
        with pytest.raises(WorkerLost, match="changed other weights of the engine") as caught:
            land(engine, policy)
        assert (
            name.rsplit(".", 2)[0] in str(caught.value) and str(caught.value) == engine.worker._broken_reason
        )
        load_base()
        engine.worker._broken_reason = None
        land(engine, policy)


# -- engines that join late, or start again


@pytest.fixture(scope="module")
def late_engine(engine_environment, policy) -> Iterator[EngineThread]:
    lora = lora_settings(policy, RANK, SCALING)
    with closing(EngineThread(extension="faulty_lora.FaultyLora", lora=lora)) as thread:
        yield thread


def largest_error(engine: EngineThread, trainer: LoraTrainer) -> float:
    return float(np.abs(engine.run(engine.worker.canary(CANARY)) - trainer.logprobs()).max())


def test_an_engine_that_joins_late_serves_only_with_the_proven_base_and_the_current_adapter(
    engine, late_engine, policy, model
):
    fleet = RealFleet(early=engine)
    trainer = LoraTrainer(MODEL, lora_settings(policy, RANK, SCALING), fleet)
    for _ in range(3):
        trainer.step()
    assert largest_error(engine, trainer) < 1e-4
    sent_to_early = dict(fleet.packages[-1].manifest)
    assert all(".lora_" in name for name in sent_to_early)

    restart(late_engine)
    fleet.join("late", late_engine)
    with pytest.raises(WorkerLost, match="has not received the policy's adapter"):
        late_engine.run(completions(late_engine, CANARY[:8], 1, 4))
    num_packages = len(fleet.packages)
    trainer.serve_late()
    late_packages = fleet.packages[num_packages:]
    assert all(package.for_late for package in late_packages)
    # The same adapter as that of the other engine, and the whole base, which the self-test has changed and restored
    final = late_packages[-1].manifest
    assert final.items() >= sent_to_early.items()
    assert {name for name in final if ".lora_" not in name} == set(weights(model))
    assert not fleet.fenced and not fleet.late
    assert largest_error(late_engine, trainer) < 1e-4
    (answer,) = late_engine.run(completions(late_engine, CANARY[:8], 1, 4))
    assert set(answer.versions) == {trainer.version}

    trainer.step()
    assert set(fleet.packages[-1].manifest) == set(sent_to_early)
    assert largest_error(engine, trainer) < 1e-4 and largest_error(late_engine, trainer) < 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_late_engine_that_loses_the_adapter_is_fenced_by_name_and_the_others_go_on(
    engine, late_engine, policy, fault
):
    lora = lora_settings(policy, RANK, SCALING)
    fleet = RealFleet(early=engine)
    trainer = LoraTrainer(MODEL, lora, fleet)
    trainer.step()
    trainer.step()
    restart(late_engine)
    fleet.join("late", late_engine)
    module = next(name for name in lora.layers if name.endswith("q_proj"))
    fail_by(late_engine, fault, module)
    trainer.serve_late()
    fail_by(late_engine, "")
    assert re.search(FAULTS[fault].format(module=module), fleet.fenced["late"])
    trainer.step()
    assert list(fleet.engines) == ["early"] and largest_error(engine, trainer) < 1e-4

    restart(late_engine)
    fleet.join("late", late_engine)
    trainer.serve_late()
    assert not fleet.late and largest_error(late_engine, trainer) < 1e-4


def test_an_engine_serves_a_restarted_trainer_only_once_it_has_that_trainer_s_adapter(engine, policy):
    lora = lora_settings(policy, RANK, SCALING)
    LoraTrainer(MODEL, lora, RealFleet(early=engine)).step()
    assert engine.run(engine.worker.begin_anew())
    with pytest.raises(WorkerLost, match="has not received the policy's adapter"):
        engine.run(completions(engine, CANARY[:8], 1, 4))
    trainer = LoraTrainer(MODEL, lora, RealFleet(early=engine))
    trainer.step()
    trainer.step()
    assert largest_error(engine, trainer) < 1e-4


@pytest.mark.exhaustive
def test_an_engine_whose_process_ended_and_started_again_gets_the_base_and_the_current_adapter(
    engine_environment, engine, policy
):
    lora = lora_settings(policy, RANK, SCALING)
    fleet = RealFleet(early=engine)
    trainer = LoraTrainer(MODEL, lora, fleet)
    for _ in range(2):
        with closing(EngineThread(extension="faulty_lora.FaultyLora", lora=lora)) as again:
            trainer.step()
            fleet.join("again", again)
            trainer.serve_late()
            trainer.step()
            assert not fleet.fenced and not fleet.late and largest_error(again, trainer) < 1e-4
            fleet.fence("again", WorkerLost("its process ended"))
        fleet.fenced.clear()


# -- what an engine refuses


def test_an_engine_without_a_layer_of_the_adapter_is_refused_by_name(engine, policy):
    from async_grpo.inference.received_weights import ReceivedWeights

    layers = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_gate")
    lora = LoraSettings(RANK, SCALING, layers, "adapter")
    with pytest.raises(ConfigurationError, match="no linear layer model.layers.0.self_attn.o_gate, .*1 of 2"):
        engine.run(ReceivedWeights(engine.worker.engine, lora).begin())
    with pytest.raises(WorkerLost, match="has not received the policy's adapter"):
        engine.worker._received.is_ready = False
        engine.run(completions(engine, CANARY[:8], 1, 4))
    engine.run(engine.worker.finish_start())
    land(engine, policy)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_gate.lora_A.weight", "lora_A.weight"])
def test_a_tensor_without_a_layer_is_refused_by_name(engine, policy, name):
    tensors = peft_tensors(policy) | {f"base_model.model.{name}": torch.ones(RANK, 128)}
    with pytest.raises(Exception, match=r"1 parts of the adapter have no layer|lora_A.weight is unsupported"):
        engine.run(engine.worker.update(next(VERSIONS), [memoryview(save(tensors))]))
    with pytest.raises(WorkerLost, match="did not finish"):
        engine.run(completions(engine, CANARY[:8], 1, 4))
    engine.worker._broken_reason = None
    engine.run(engine.worker.finish_start())
    land(engine, policy)
