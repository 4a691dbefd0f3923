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
from two_ranks import on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.cluster import make_trainer
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.modeling.policy import named_full_tensors
from async_grpo.training.export import ModelExporter
from async_grpo.training.objective import Objective

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
    policy = make_trainer._policy(config, settings, ranks)
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
