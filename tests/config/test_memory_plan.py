"""The plan of the memory is only an estimate, so it must not keep any model from being trained."""

import pytest
from fake_chain import SETTINGS, chain_config
from transformers import AutoConfig

from async_grpo.config.memory_plan import mlp_width, trainer_rank_bytes


@pytest.mark.parametrize(
    ("model_type", "width_option", "width"),
    [
        ("qwen2", "intermediate_size", 320),
        ("qwen3_moe", "moe_intermediate_size", 320),
        ("opt", "ffn_dim", 320),
        ("gpt2", "n_inner", 320),
        ("gpt2", "n_inner", None),
        ("falcon", "ffn_hidden_size", 320),
        ("bloom", None, None),
    ],
)
def test_every_architecture_has_an_estimate(model_type, width_option, width):
    options = {width_option: width} if width_option else {}
    model = AutoConfig.for_model(model_type, hidden_size=64, num_hidden_layers=2, **options)
    expected_width = width or 4 * 64
    assert mlp_width(model) == expected_width
    config = chain_config(max_tokens_per_gpu=100)
    num_bytes = trainer_rank_bytes(config, SETTINGS, model, num_ranks=1, num_parameters=1000)
    assert num_bytes > 100 * 4 * 2 * 4 * expected_width
