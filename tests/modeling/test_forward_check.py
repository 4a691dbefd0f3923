"""The forward at the start, which refuses models that no rule knows: it compares what they compute."""

from types import SimpleNamespace

import pytest
import torch
from tiny_policy import SETTINGS, VOCAB, save_tiny_model, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    DogeConfig,
    Gemma3TextConfig,
    NemotronConfig,
    PreTrainedConfig,
)

from async_grpo.cluster import policy_kinds
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.inference.logprob_config import LogprobConfig
from async_grpo.inference.logprob_worker import LogprobWorker
from async_grpo.modeling.forward_check import check_forward
from async_grpo.modeling.packed import PACKED_ATTENTION
from async_grpo.modeling.policy import PolicyModel

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BIDIRECTIONAL = {"use_bidirectional_attention": True, "layer_types": ["full_attention"] * 2}


def refusal_of(policy: PolicyModel, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(ConfigurationError) as refused:
        check_forward(policy, dtype)
    return str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_a_healthy_policy_passes_and_is_left_as_it_was(dtype, mode):
    policy = PolicyModel(tiny_model().to(dtype)).train(mode)
    before = torch.get_rng_state()
    check_forward(policy, dtype)
    assert torch.equal(before, torch.get_rng_state())
    assert policy.training == policy.model.training == mode
    assert policy.model.config._attn_implementation == PACKED_ATTENTION
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_model_whose_layers_mix_neighbours_in_the_row_is_refused():
    """As a convolution or a recurrence does: each token sees the one before, of whichever sequence."""
    model = tiny_model()

    def mix(module, inputs, output):
        return output + 0.5 * output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(mix)
    text = refusal_of(PolicyModel(model))
    assert "Qwen2ForCausalLM cannot be packed" in text and "docs/models.md" in text


def test_a_model_that_changes_its_logits_behind_the_head_is_refused_under_whatever_name():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda module, inputs, output: 10 * torch.tanh(output / 10))
    assert "differ from those of each sequence alone by" in refusal_of(PolicyModel(model))


def test_noise_that_no_setting_names_is_refused_in_training_and_does_not_matter_in_evaluation():
    model = tiny_model()

    def jitter(module, inputs, output):
        return output * torch.empty_like(output).uniform_(0.9, 1.1) if module.training else output

    model.model.layers[1].mlp.register_forward_hook(jitter)
    policy = PolicyModel(model)
    check_forward(policy.eval(), torch.float32)
    assert "random in training mode" in refusal_of(policy.train())


def test_a_model_that_computes_something_else_in_training_than_an_engine_does_is_refused():
    model = tiny_model()
    model.model.norm.register_forward_hook(lambda module, inputs, out: out * 1.1 if module.training else out)
    policy = PolicyModel(model)
    check_forward(policy.eval(), torch.float32)
    assert "cannot be packed" in refusal_of(policy.train())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_are_not_finite_are_refused(dtype):
    model = tiny_model().to(dtype)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    assert "by nan" in refusal_of(PolicyModel(model), dtype)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DogeConfig(**SIZES, num_key_value_heads=1), "a mask of its own"),
        (NemotronConfig(**SIZES, num_key_value_heads=1, head_dim=32), "not told where sequences begin"),
        (Gemma3TextConfig(**SIZES, num_key_value_heads=1, head_dim=32, **BIDIRECTIONAL), "later tokens"),
        (BertConfig(**SIZES, **NO_DROPOUT), "later tokens"),
        (
            BertConfig(**SIZES, **NO_DROPOUT, is_decoder=True),
            "its head are not what the packed forward computes",
        ),
    ],
    ids=["doge", "nemotron", "bidirectional gemma3", "bert", "bert as a decoder"],
)
def test_families_that_were_silently_wrong_or_crashed_are_refused_with_the_reason(config, reason):
    torch.manual_seed(0)
    policy = PolicyModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert reason in refusal_of(policy.train())


def test_an_attention_argument_that_nobody_knows_is_refused():
    """Such as the indices of a sparse attention: with few tokens it attends to all, and only the name tells."""
    model = tiny_model()
    forward = model.model.layers[0].self_attn.forward
    model.model.layers[0].self_attn.forward = lambda *args, **kwargs: forward(
        *args, **kwargs, block_indices=torch.zeros(1)
    )
    assert "Qwen2Attention asks for: block_indices" in refusal_of(PolicyModel(model))


def test_trainer_and_logprob_worker_refuse_at_their_start(tmp_path, ranks):
    torch.manual_seed(0)
    config: PreTrainedConfig = BertConfig(**SIZES, **NO_DROPOUT, is_decoder=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    run = RunConfig(model_name_or_path=str(tmp_path), data_path="x", reward_fns="format")
    with pytest.raises(ConfigurationError, match="BertLMHeadModel cannot be packed"):
        policy_kinds.load_language_policy(run, SETTINGS, ranks)
    worker = SimpleNamespace(**vars(LogprobConfig()), model_path=str(tmp_path))
    with pytest.raises(ConfigurationError, match="BertLMHeadModel cannot be packed"):
        LogprobWorker.start(worker, SETTINGS)


def test_a_healthy_folder_starts_trainer_and_logprob_worker_in_half_precision_too(tmp_path, ranks):
    save_tiny_model(tmp_path)
    run = RunConfig(model_name_or_path=str(tmp_path), data_path="x", reward_fns="format", dtype="bfloat16")
    settings = SETTINGS.__class__(**{**vars(SETTINGS), "dtype": "bfloat16"})
    assert policy_kinds.load_language_policy(run, settings, ranks).training
    worker = SimpleNamespace(**vars(LogprobConfig()), model_path=str(tmp_path))
    LogprobWorker.start(worker, settings).close()


def test_a_fault_of_the_device_is_no_fault_of_the_model():
    policy = PolicyModel(tiny_model())

    def fail(*args, **kwargs):
        raise torch.AcceleratorError("device-side assert")

    policy.model.model.layers[0].mlp.forward = fail
    with pytest.raises(torch.AcceleratorError):
        check_forward(policy, torch.float32)


def test_ranks_decide_alike_after_all_forwards():
    """A rank that finds nothing refuses with the one that does, instead of waiting for it in a collective."""
    with pytest.raises(ConfigurationError, match="cannot be packed"):
        check_forward(PolicyModel(tiny_model()), torch.float32, lambda verdicts: [verdicts[0], 1.0])
    with pytest.raises(ConfigurationError, match="is random in"):
        check_forward(PolicyModel(tiny_model()), torch.float32, lambda verdicts: [1.0, 0.0])


def test_a_configuration_without_named_outputs_is_computed_all_the_same():
    model = tiny_model()
    model.config.return_dict = False
    check_forward(PolicyModel(model), torch.float32)


def test_a_failure_of_the_plain_forward_refuses_the_model_too():
    policy = PolicyModel(tiny_model())

    def fail(*args):
        raise ValueError("no such attention")

    policy.plain_logprobs = fail
    assert "no such attention" in refusal_of(policy)
