"""LoRA: what is trained, sent and written is what peft computes in one process."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tiny_policy import SETTINGS, pack, random_sequence, save_tiny_model
from transformers import AutoModelForCausalLM
from two_ranks import full, on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.cluster import make_trainer, policy_kinds
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.launch.export import ExportConfig, export
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.lora import lora_switched_off, named_lora_tensors
from async_grpo.modeling.policy import PolicyModel, named_full_tensors
from async_grpo.training.base_reference import add_base_logprobs
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.export import ModelExporter
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import release_gathered

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft_adapter(folder, model_folder, *, rank=4, targets=TARGETS, **options):
    """An adapter whose B is not zero, made and written by peft."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adapted = get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **options)
    )
    torch.manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder)
    return folder


def peft_model(folder):
    """The model and the adapter of a test's folder, loaded by peft, in training mode."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    return PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True).train()


def run_config(folder, **options):
    return RunConfig(model_name_or_path=str(folder / "model"), data_path="x", reward_fns="format", **options)


def settings_of(config, **changes):
    return dataclasses.replace(SETTINGS, lora=lora_settings(config, config.model_name_or_path), **changes)


@pytest.fixture
def folder(tmp_path):
    save_tiny_model(tmp_path / "model")
    peft_adapter(tmp_path / "adapter", tmp_path / "model")
    return tmp_path


def sequences_of(seed):
    rng = np.random.default_rng(seed)
    return [random_sequence(rng) for _ in range(6)]


def reference_gradients(folder, sequences):
    """peft and arithmetic: the loss -advantage * log-prob, summed over the tokens of all sequences, token by token."""
    model = peft_model(folder)
    losses = []
    for sequence in sequences:
        ids = torch.tensor(sequence["ids"])
        logprobs = torch.log_softmax(model(ids[None], use_cache=False).logits[0], dim=-1)
        for t in range(1, len(ids)):
            if sequence["mask"][t]:
                losses.append(-float(np.float32(sequence["advantages"][t])) * logprobs[t - 1, ids[t]])
    torch.stack(losses).mean().backward()
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            gradients[name.removeprefix("base_model.model.")] = weight.grad
    return gradients


def step_on_ranks(ranks, folder, seed):
    """Gradients of a step whose micro-batches are dealt to the ranks, and what is sent and exported before it."""
    sequences = sequences_of(seed)
    config = run_config(folder, init_adapter=str(folder / "adapter"))
    settings = settings_of(config)
    policy = policy_kinds.load_language_policy(config, settings, ranks)
    sent = {name: tensor.clone() for name, tensor in named_full_tensors(policy)}
    exporter = ModelExporter(folder, folder / "model", ranks, lora=settings.lora)
    exporter.save(policy, 1)
    objective = Objective(AlgorithmConfig(policy_loss="grpo", loss_aggregation="token_mean"))
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    for batch in (sequences[ranks.rank : 4 : 2], sequences[4 + ranks.rank : 5 + ranks.rank]):
        accumulator.add(pack(batch))
    accumulator.finish()
    return optimizer.gradients, sent


def test_gradients_of_two_ranks_and_the_weights_that_are_sent_are_those_of_peft_in_one_process(folder):
    gradients, sent = on_two_ranks(partial(step_on_ranks, seed=1), folder)
    expected = reference_gradients(folder, sequences_of(1))
    assert (
        len(gradients) == len(expected) == 2 * 7 * 2
    )  # A and B of seven layers in two blocks, and nothing else
    got = {name: gradients[f"model.{name}"] for name in expected}
    error, worst = relative_error(got, expected)
    assert error < 1e-5 and worst < 1e-5
    merged = peft_model(folder).merge_and_unload().state_dict()
    assert set(sent) == set(merged) - {"lm_head.weight"}  # the head is tied to the embedding
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6, msg=name)


def test_an_exported_adapter_is_the_one_that_peft_wrote_and_peft_loads_it(folder):
    on_two_ranks(partial(step_on_ranks, seed=2), folder)
    exported = folder / "hf_format" / "samples_1"
    ours = load_file(exported / "adapter_model.safetensors")
    theirs = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ids = torch.arange(1, 30)[None]
    expected = peft_model(folder)(ids).logits
    model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    loaded = PeftModel.from_pretrained(model, exported)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=0)


def policy_of(folder, ranks, dtype="float32", **options):
    """(configuration, settings, policy) of a run."""
    config = run_config(folder, **options)
    settings = settings_of(config, dtype=dtype)
    return config, settings, policy_kinds.load_language_policy(config, settings, ranks)


def logprobs_of(policy):
    ids = torch.arange(1, 30)
    boundaries = torch.tensor([0, len(ids)])
    logprobs, *_ = policy(ids, boundaries, torch.ones(len(ids), dtype=torch.bool), 1.0)
    return logprobs.detach()


def logprobs_and_base_logprobs(ranks, folder):
    """Log-probs with the adapter, then without it, and then with it again; and the values of a new adapter."""
    _, _, policy = policy_of(folder, ranks, init_adapter=str(folder / "adapter"))
    before = logprobs_of(policy)
    objective = Objective(AlgorithmConfig(kl_coef=0.1), reference_is_base=True)
    batch = BatchTensors(pack(sequences_of(3)), policy.device)
    add_base_logprobs(policy, objective, batch)
    with lora_switched_off(policy.model):
        switched_off = logprobs_of(policy)
        release_gathered(policy)
    trained = [name for name, weight in policy.named_parameters() if weight.requires_grad]
    _, _, new = policy_of(folder, ranks, lora_rank=4)
    return {
        "with": before,
        "again": logprobs_of(policy),
        "without": switched_off,
        "reference": batch.ref_logprobs,
        "trained": trained,
        "new": logprobs_of(new),
    }


def test_the_reference_is_the_base_and_a_new_adapter_changes_nothing(folder):
    results = on_two_ranks(logprobs_and_base_logprobs, folder)
    base = PolicyModel(load_causal_lm(folder / "model", "float32"))
    torch.testing.assert_close(results["without"], logprobs_of(base), rtol=0, atol=1e-6)
    torch.testing.assert_close(results["new"], logprobs_of(base), rtol=0, atol=1e-6)
    objective = Objective(AlgorithmConfig(kl_coef=0.1))
    expected, *_ = objective.forward(base, BatchTensors(pack(sequences_of(3)), base.device))
    torch.testing.assert_close(results["reference"], expected.detach(), rtol=0, atol=1e-6)
    assert (results["with"] - results["without"]).abs().max() > 0.1
    assert torch.equal(results["with"], results["again"])
    assert len(results["trained"]) == 2 * 7 * 2


def checkpoint_of_two_steps(ranks, folder):
    """Train a step, save, train another one; load the checkpoint into a second policy, and train the same step."""
    batches = [pack(sequences_of(seed)) for seed in (4, 5)]
    policies = []
    for part in ("first", "second"):
        config, settings, policy = policy_of(folder, ranks, lora_rank=4, output_dir=str(folder / "run"))
        accumulator = policy_kinds.make_accumulator(config, settings, policy, ranks)
        checkpointer = make_trainer._checkpointer(config, settings, ranks, policy, accumulator, None, {})
        if part == "first":
            accumulator.add(batches[0])
            accumulator.finish()
            checkpointer.save(1, 6)
            assert checkpointer.wait()
        else:
            checkpointer.load(folder / "run" / "checkpoints" / "step_000000001")
        accumulator.add(batches[1])
        accumulator.finish()
        tensors = {name: full(tensor.detach()).clone() for name, tensor in named_lora_tensors(policy.model)}
        policies.append(tensors)
    return policies


def test_a_checkpoint_holds_the_adapter_alone_and_goes_on_bit_for_bit(folder):
    first, second = on_two_ranks(checkpoint_of_two_steps, folder)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(float(tensor.abs().max()) > 0 for name, tensor in first.items() if "lora_B" in name)
    checkpoint = folder / "run" / "checkpoints" / "step_000000001"
    stored = set()
    for file in (checkpoint / "training").glob("*.safetensors"):
        stored |= set(load_file(file))
    weights = {name for name in stored if name.startswith("weights.")}
    assert len(weights) == 2 * 7 * 2 and all(".lora_" in name for name in weights)


def exported(folder, name, **options):
    target = folder / name
    export(ExportConfig(output_dir=str(target), dtype="float32", **options))
    return target


def test_a_checkpoint_is_exported_as_an_adapter_and_merged_and_both_compute_the_same(folder):
    on_two_ranks(checkpoint_of_two_steps, folder)
    adapter = exported(folder, "as_adapter", path=str(folder / "run"))
    merged = exported(folder, "as_model", path=str(folder / "run"), merged=True)
    merged_later = exported(folder, "merged_later", path=str(adapter), merged=True)
    ids = torch.arange(1, 30)[None]
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    unchanged = base(ids).logits.clone()
    expected = PeftModel.from_pretrained(base, adapter)(ids).logits
    assert (expected - unchanged).abs().max() > 1e-5  # a step changed something
    for model in (merged, merged_later):
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits
        # Relative to the largest logit: rounding grows with the numbers that are summed
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def step_in_bfloat16(ranks, folder):
    """The dtypes of the weights, and whether a step changed only the adapters, with a base in bfloat16."""
    config, settings, policy = policy_of(folder, ranks, dtype="bfloat16", lora_rank=4, kl_coef=0.1)
    dtypes = {name: str(weight.dtype) for name, weight in policy.named_parameters()}
    before = {name: full(weight.detach()).clone() for name, weight in policy.named_parameters()}
    accumulator = policy_kinds.make_accumulator(config, settings, policy, ranks)
    accumulator.add(pack(sequences_of(6)))
    metrics = accumulator.finish()
    changed = []
    for name, weight in policy.named_parameters():
        if not torch.equal(full(weight.detach()), before[name]):
            changed.append(name)
    return dtypes, changed, metrics["update_skipped"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_base_in_bfloat16_is_frozen_and_the_adapters_are_float32(folder, world_size):
    dtypes, changed, skipped = on_two_ranks(step_in_bfloat16, folder, world_size=world_size)
    assert {name for name, dtype in dtypes.items() if dtype == "torch.float32"} == {
        name for name in dtypes if ".lora_" in name
    }
    assert set(dtypes.values()) == {"torch.float32", "torch.bfloat16"}
    # In the first step only B changes: the gradient of A is zero while B is zero
    assert not skipped and changed == [name for name in dtypes if ".lora_B." in name]
