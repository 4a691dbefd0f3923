"""An adapter over a base in 4 bits: trained, sent, compared and written with the values that the trainer computes with."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch
from bits_and_bytes import needs_bits_and_bytes, of_bits_and_bytes
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_policy import SETTINGS, pack, random_sequence, save_tiny_model
from transformers import AutoModelForCausalLM
from two_ranks import full, on_two_ranks, recording_accumulator, relative_error

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.cluster import make_trainer, policy_kinds
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.launch.export import ExportConfig, export
from async_grpo.modeling import full_tensor
from async_grpo.modeling.four_bit import dequantised, quantised
from async_grpo.modeling.lora import linear_layers, named_lora_tensors
from async_grpo.modeling.policy import (
    PolicyModel,
    named_full_tensors,
    named_weights,
    named_weights_and_adapters,
)
from async_grpo.training.base_reference import add_base_logprobs
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import canary_logprobs
from async_grpo.weights.self_test import last_bits_flipped, perturbed

TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
MODEL = {"intermediate_size": 128}
NOT_IN_BLOCKS = {"intermediate_size": 96}  # the rows of down_proj are not whole blocks of 64
CANARY = np.arange(1, 30)


def new_folder(folder, **model):
    """A model and an adapter of some of its layers, whose B is not zero, written by peft."""
    save_tiny_model(folder / "model", **(MODEL | model))
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    torch.manual_seed(3)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def folder(tmp_path):
    return new_folder(tmp_path)


def dequantised_model(folder):
    """The plain model, with the values of 4 bits in all linear layers with whole blocks, except the head."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, layer in model.named_modules():
            if name.endswith("_proj") and layer.in_features % 64 == 0:
                layer.weight.copy_(dequantised(*quantised(layer.weight), torch.float32))
    return model


def peft_model(folder):
    """The model and the adapter in one process, as peft computes them."""
    return PeftModel.from_pretrained(dequantised_model(folder), folder / "adapter", is_trainable=True).train()


def policy_of(folder, ranks, dtype="float32", **options):
    """(configuration, settings, policy) of a run that begins with the adapter."""
    options = {"init_adapter": str(folder / "adapter"), "load_in_4bit": True} | options
    config = RunConfig(
        model_name_or_path=str(folder / "model"), data_path="x", reward_fns="format", **options
    )
    lora = lora_settings(config, config.model_name_or_path)
    settings = dataclasses.replace(SETTINGS, dtype=dtype, lora=lora)
    return config, settings, policy_kinds.load_language_policy(config, settings, ranks)


def sequences_of(seed):
    rng = np.random.default_rng(seed)
    return [random_sequence(rng) for _ in range(6)]


def tokens_and_losses(sequences):
    """(ids, positions, advantages) of each sequence that is trained on."""
    for sequence in sequences:
        positions = np.flatnonzero(sequence["mask"])
        positions = positions[positions > 0]
        if len(positions):
            yield sequence["ids"], positions, np.float32(sequence["advantages"][positions])


def reference_gradients(model, sequences):
    """The gradients of the loss -advantage * log-prob, a mean over the tokens of all sequences, by names of the model."""
    losses = []
    for ids, positions, advantages in tokens_and_losses(sequences):
        ids = torch.tensor(ids)
        logprobs = torch.log_softmax(model(ids[None], use_cache=False).logits[0].float(), dim=-1)
        chosen = logprobs[positions - 1, ids[positions]]
        losses.append(-torch.tensor(advantages) * chosen)
    torch.cat(losses).mean().backward()
    gradients = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            gradients[name.removeprefix("base_model.model.")] = weight.grad.float()
    return gradients


def step_on_ranks(ranks, folder, seed, **options):
    """Gradients of a step, and all weights that are sent before it, merged and with the adapter apart."""
    sequences = sequences_of(seed)
    _, _, policy = policy_of(folder, ranks, **options)
    sent = {name: tensor.clone() for name, tensor in named_full_tensors(policy)}
    apart = {name: full_tensor(weight).clone() for name, weight in named_weights_and_adapters(policy)}
    objective = Objective(AlgorithmConfig(policy_loss="grpo", loss_aggregation="token_mean"))
    accumulator, optimizer = recording_accumulator(policy, objective, ranks)
    share = slice(ranks.rank, 4, ranks.world_size)
    last = slice(4 + ranks.rank, 6, ranks.world_size)
    for batch in (sequences[share], sequences[last]):
        accumulator.add(pack(batch))
    accumulator.finish()
    return optimizer.gradients, sent, apart


LAYOUTS = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "offloaded and recomputed": (2, {"cpu_offload": True, "gradient_checkpointing": True}),
    "copies": (2, {"fsdp_size": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_sent_weights_are_those_of_peft_over_the_dequantised_base(folder, layout):
    world_size, options = LAYOUTS[layout]
    step = partial(step_on_ranks, seed=1, **options)
    gradients, sent, apart = on_two_ranks(step, folder, world_size=world_size)
    expected = reference_gradients(peft_model(folder), sequences_of(1))
    assert len(gradients) == len(expected) == 2 * len(TARGETS) * 2
    error, worst = relative_error({name: gradients[f"model.{name}"] for name in expected}, expected)
    assert error < 1e-5 and worst < 1e-5
    merged = peft_model(folder).merge_and_unload().state_dict()
    assert set(sent) == set(merged) - {"lm_head.weight"}  # the head is tied to the embedding
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6, msg=name)
    base = dequantised_model(folder).state_dict()
    original = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    frozen = {name: tensor for name, tensor in apart.items() if ".lora_" not in name}
    assert set(frozen) == set(sent) and len(apart) == len(frozen) + 2 * len(TARGETS) * 2
    assert all(torch.equal(tensor, base[name]) for name, tensor in frozen.items())
    changed = {name for name in frozen if not torch.equal(base[name], original[name])}
    assert changed == {name for name in frozen if name.endswith("_proj.weight")}


def test_a_layer_whose_rows_are_not_whole_blocks_keeps_its_dtype(tmp_path):
    folder = new_folder(tmp_path, **NOT_IN_BLOCKS)
    gradients, sent, _ = on_two_ranks(partial(step_on_ranks, seed=2), folder)
    expected = reference_gradients(peft_model(folder), sequences_of(2))
    error, _ = relative_error({name: gradients[f"model.{name}"] for name in expected}, expected)
    assert error < 1e-5
    merged = peft_model(folder).merge_and_unload().state_dict()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6, msg=name)


def logprobs_and_base_logprobs(ranks, folder):
    """The trainer's log-probs with and without the adapter, and the frozen weights in 4 bits that it stores."""
    _, _, policy = policy_of(folder, ranks, kl_coef=0.1)
    objective = Objective(AlgorithmConfig(kl_coef=0.1), reference_is_base=True)
    batch = BatchTensors(pack(sequences_of(3)), policy.device)
    add_base_logprobs(policy, objective, batch)
    return torch.from_numpy(canary_logprobs(policy, CANARY)), batch.ref_logprobs


def test_the_reference_of_the_kl_is_the_base_in_4_bits(folder):
    logprobs, reference = on_two_ranks(logprobs_and_base_logprobs, folder)
    base = PolicyModel(dequantised_model(folder))
    expected, *_ = Objective(AlgorithmConfig(kl_coef=0.1)).forward(
        base, BatchTensors(pack(sequences_of(3)), base.device)
    )
    torch.testing.assert_close(reference, expected.detach(), rtol=0, atol=1e-5)
    merged = PolicyModel(peft_model(folder).merge_and_unload())
    with torch.no_grad():
        expected_logprobs = torch.from_numpy(canary_logprobs(merged, CANARY))
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    original = PolicyModel(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32))
    other, *_ = Objective(AlgorithmConfig(kl_coef=0.1)).forward(
        original, BatchTensors(pack(sequences_of(3)), original.device)
    )
    assert (other - reference).abs().max() > 0.1  # another reference than the unquantised base


def self_test_on_ranks(ranks, folder):
    """Log-probs before, during and after a change of all weights, and during and after a flip of their last bits."""
    found = []
    for dtype in ("float32", "bfloat16"):
        _, _, policy = policy_of(folder, ranks, dtype)
        weights = dict(named_weights(policy))
        canaries = [canary_logprobs(policy, CANARY)]
        for change in (perturbed(weights), last_bits_flipped(weights.values(), torch.bfloat16)):
            with change:
                canaries.append(canary_logprobs(policy, CANARY))
            canaries.append(canary_logprobs(policy, CANARY))
        found.append(torch.tensor(np.stack(canaries)))
    return found


def test_the_self_test_changes_weights_in_4_bits_and_restores_them(folder):
    for before, changed, again, flipped, restored in on_two_ranks(self_test_on_ranks, folder):
        assert torch.equal(before, again) and torch.equal(before, restored)
        assert (changed - before).abs().max() > 0.5
        assert 0 < (flipped - before).abs().max() < 0.2 * (changed - before).abs().max()


def stored_bytes(ranks, folder):
    _, settings, policy = policy_of(folder, ranks, "bfloat16")
    frozen = [weight for weight in policy.model.parameters() if not weight.requires_grad]
    return sum(weight.numel() * weight.element_size() for weight in frozen), dataclasses.asdict(settings.lora)


def test_the_frozen_weights_take_nine_sixteenths_of_a_byte(folder):
    num_bytes, lora = on_two_ranks(stored_bytes, folder)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    names = linear_layers(model)
    num_linear = sum(model.get_submodule(name).weight.numel() for name in names)
    num_others = sum(weight.numel() for weight in model.parameters()) - num_linear
    assert lora["num_four_bit_weights"] == num_linear and set(lora["four_bit_layers"]) == set(names)
    assert num_bytes == num_linear * 9 / 16 + 2 * num_others


def two_steps(ranks, folder):
    """Train a step, save, train another one; load the checkpoint into a second policy, and train the same step."""
    policies = []
    for part in ("first", "second"):
        config, settings, policy = policy_of(
            folder, ranks, lora_rank=4, init_adapter=None, output_dir=str(folder / "run"), learning_rate=1e-2
        )
        accumulator = policy_kinds.make_accumulator(config, settings, policy, ranks)
        checkpointer = make_trainer._checkpointer(config, settings, ranks, policy, accumulator, None, {})
        if part == "first":
            accumulator.add(pack(sequences_of(4)))
            accumulator.finish()
            checkpointer.save(1, 6)
            assert checkpointer.wait()
            saved = {name: tensor.clone() for name, tensor in named_full_tensors(policy)}
        else:
            checkpointer.load(folder / "run" / "checkpoints" / "step_000000001")
        accumulator.add(pack(sequences_of(5)))
        accumulator.finish()
        tensors = {name: full(tensor.detach()).clone() for name, tensor in named_lora_tensors(policy.model)}
        policies.append(tensors)
    return policies, saved


def test_a_checkpoint_goes_on_bit_for_bit_and_its_merged_export_has_the_weights_that_were_sent(folder):
    (first, second), saved = on_two_ranks(two_steps, folder)
    assert all(torch.equal(first[name], second[name]) for name in first)
    options = {"path": str(folder / "run"), "merged": True, "dtype": "float32"}
    export(ExportConfig(output_dir=str(folder / "merged"), **options))
    exported = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).state_dict()
    for name, tensor in saved.items():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-6, msg=name)
    original = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    name = "model.layers.0.mlp.gate_proj.weight"
    assert (exported[name] - original[name]).abs().max() > 1e-2


def test_a_model_without_a_layer_of_whole_blocks_is_refused(tmp_path):
    save_tiny_model(tmp_path / "model", hidden_size=48, intermediate_size=96)
    config = RunConfig(
        model_name_or_path=str(tmp_path / "model"), data_path="x", lora_rank=4, load_in_4bit=True
    )
    with pytest.raises(ConfigurationError, match="--load-in-4bit: no linear layer .* multiple of 64 inputs"):
        lora_settings(config, config.model_name_or_path)


PEFT_WITH_BITS_AND_BYTES = """
import json
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
model = AutoModelForCausalLM.from_pretrained(
    "model", dtype=torch.float32, attn_implementation="eager", quantization_config=quantization, device_map="cpu"
)
model = PeftModel.from_pretrained(model, "adapter", is_trainable=True).train()
losses = []
for ids, positions, advantages in json.load(open("sequences.json")):
    ids, positions = torch.tensor(ids), torch.tensor(positions)
    logprobs = torch.log_softmax(model(ids[None], use_cache=False).logits[0].float(), dim=-1)
    losses.append(-torch.tensor(advantages) * logprobs[positions - 1, ids[positions]])
torch.cat(losses).mean().backward()
named = [(name.removeprefix("base_model.model."), weight) for name, weight in model.named_parameters()]
layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
found = {name: weight.grad for name, weight in named if weight.requires_grad}
torch.save((type(layer).__module__, found), "found.pt")
"""


@needs_bits_and_bytes
def test_gradients_are_those_of_peft_with_bitsandbytes_in_one_process(folder):
    gradients, *_ = on_two_ranks(partial(step_on_ranks, seed=6), folder)
    sequences = [
        (ids.tolist(), positions.tolist(), advantages.tolist())
        for ids, positions, advantages in tokens_and_losses(sequences_of(6))
    ]
    (folder / "sequences.json").write_text(json.dumps(sequences))
    module, expected = of_bits_and_bytes(PEFT_WITH_BITS_AND_BYTES, folder)
    assert module == "peft.tuners.lora.bnb"  # the reference is what it says
    assert len(expected) == len(gradients) == 2 * len(TARGETS) * 2
    error, worst = relative_error({name: gradients[f"model.{name}"] for name in expected}, expected)
    assert error < 1e-5 and worst < 1e-5
