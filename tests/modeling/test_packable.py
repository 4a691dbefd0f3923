"""Which models are refused before anything is computed, and by which value of their configuration."""

import copy

import pytest
import torch
from tiny_policy import VOCAB, tiny_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    GPT2Config,
    Idefics3Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PhimoeConfig,
    SeedOssConfig,
    SmolVLMConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.packable import (
    check_packable_configuration,
    depends_on_length,
    random_settings,
    rope_types,
)
from async_grpo.modeling.policy import PolicyModel

SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": None}
ROPE = {
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    ("config", "setting"),
    [
        (
            SeedOssConfig(**SIZES, **HEADS, residual_dropout=0.1, attention_dropout=0.0),
            "residual_dropout 0.1",
        ),
        (MixtralConfig(**SIZES, **HEADS, **EXPERTS, router_jitter_noise=0.3), "router_jitter_noise 0.3"),
        (
            PhimoeConfig(
                **SIZES, num_attention_heads=2, num_key_value_heads=1, **EXPERTS, input_jitter_noise=0.2
            ),
            "input_jitter_noise 0.2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_randomness_that_is_no_dropout_module_is_refused_by_its_name_and_really_is_random(config, setting):
    model = AutoModelForCausalLM.from_config(config).train()
    assert not any(isinstance(module, torch.nn.Dropout) and module.p for module in model.modules())
    ids = torch.arange(12)[None]
    with torch.no_grad():
        first, second = model(input_ids=ids).logits, model(input_ids=ids).logits
    assert not torch.equal(first, second)
    with pytest.raises(
        ConfigurationError, match=f"{setting}.*random in training; set it to 0 in config.json"
    ):
        PolicyModel(model)


@pytest.mark.parametrize("config", [SmolVLMConfig(), Idefics3Config()], ids=["smolvlm", "idefics3"])
def test_models_that_cut_images_into_tiles_are_refused_with_the_reason(config):
    with pytest.raises(ConfigurationError, match=f"{config.model_type}' cut an image into tiles"):
        check_packable_configuration(config)


@pytest.mark.parametrize("windows", [True, False])
def test_a_gemma_3_that_reads_images_is_refused_with_the_reason(windows):
    config = Gemma3Config()
    if not windows:
        config.text_config.sliding_window = None
        config.text_config.layer_types = ["full_attention"] * config.text_config.num_hidden_layers
    with pytest.raises(
        ConfigurationError, match="'gemma3', the tokens of an image attend to each other in both directions"
    ):
        check_packable_configuration(config)


def test_random_settings_are_found_in_nested_configurations_and_those_of_other_heads_are_not():
    nested = {
        "text_config": {"moe_jitter_eps": 0.01, "use_dropout": True, "hidden_dropout": 0},
        "drop_path_rate": 0.2,
    }
    assert dict(random_settings(nested)) == {"moe_jitter_eps": 0.01, "drop_path_rate": 0.2}
    config = LlamaConfig(**SIZES)
    config.draft_config = SeedOssConfig(**SIZES, residual_dropout=0.25, attention_dropout=0.0)
    assert dict(random_settings(config)) == {"residual_dropout": 0.25}
    gpt2 = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # summary_first_dropout is 0.1
    assert not dict(random_settings(gpt2))


@pytest.mark.parametrize("rope_type", ROPE_INIT_FUNCTIONS)
def test_rope_types_are_refused_if_and_only_if_their_frequencies_depend_on_the_length(rope_type):
    """Read off a model: the same positions, computed beside a much longer sequence or not."""
    parameters = {"rope_type": rope_type, **ROPE}
    config = LlamaConfig(**SIZES, **HEADS, max_position_embeddings=8, rope_parameters=parameters)
    model = LlamaForCausalLM(config)
    rotary = model.model.rotary_emb
    inputs, short, long = torch.zeros(1, 1, 64), torch.arange(6)[None], torch.arange(40)[None]
    with torch.no_grad():
        alone = copy.deepcopy(rotary)(inputs, short)[0]
        beside = copy.deepcopy(rotary)(inputs, long)[0][:, :6]
    is_dependent = not torch.allclose(alone, beside)
    assert depends_on_length(rope_type) == is_dependent
    if is_dependent:
        with pytest.raises(
            ConfigurationError, match=f"rope_type '{rope_type}'.*set rope_parameters in config.json"
        ):
            PolicyModel(model)
    else:
        PolicyModel(model)


def test_rope_types_of_single_kinds_of_layers_are_seen():
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {
        "full_attention": {"rope_type": "longrope", **ROPE},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert rope_types(config) == ["default", "longrope"]


@pytest.mark.parametrize("name", ["logits_scaling", "logit_scale", "lm_head_multiplier"])
def test_factors_of_the_head_are_refused_unless_they_are_one(name):
    model = tiny_model()
    setattr(model.config, name, 1.0)
    PolicyModel(model)
    setattr(model.config, name, 0.25)
    with pytest.raises(ConfigurationError, match=f"plain linear head, but the model has .*{name}.*0.25"):
        PolicyModel(model)
