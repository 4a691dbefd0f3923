"""A model whose folder holds codes of quantised weights is refused: read as numbers they would be nonsense."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import SETTINGS, save_tiny_model

from async_grpo.cluster import policy_kinds
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.inference.logprob_config import LogprobConfig
from async_grpo.inference.logprob_worker import LogprobWorker
from async_grpo.launch.plan import parameters_of
from async_grpo.modeling.model_files import weight_shapes

NAME = "model.layers.0.self_attn.q_proj.weight"


def quantise(folder, dtype):
    """Store one weight as codes and a scale, as models in fp8 have theirs."""
    weights = load_file(folder / "model.safetensors")
    scale = weights[NAME].abs().max() / 100
    weights[NAME] = (weights[NAME] / scale).to(dtype)
    weights[f"{NAME}_scale_inv"] = scale.reshape(1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def set_in_configuration(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def readers_of(folder, ranks):
    run = RunConfig(model_name_or_path=str(folder), data_path="x", reward_fns="format")
    worker = SimpleNamespace(**vars(LogprobConfig()), model_path=str(folder))
    return {
        "trainer": lambda: policy_kinds.load_language_policy(run, SETTINGS, ranks),
        "logprob worker": lambda: LogprobWorker.start(worker, SETTINGS),
        "preflight": lambda: parameters_of(folder),
    }


def test_a_configuration_of_quantised_weights_is_refused_with_the_method(tmp_path, ranks):
    folder = save_tiny_model(tmp_path / "model")
    quantise(folder, torch.float8_e4m3fn)
    set_in_configuration(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    for read in readers_of(folder, ranks).values():
        with pytest.raises(ConfigurationError, match="method 'fp8'.*train the unquantised model"):
            read()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
def test_codes_that_no_configuration_names_are_refused_with_their_dtype(tmp_path, ranks, dtype):
    folder = save_tiny_model(tmp_path / "model")
    quantise(folder, dtype)
    for read in readers_of(folder, ranks).values():
        with pytest.raises(ConfigurationError, match=rf"{NAME} .* is stored as [FIU]8.*unquantised"):
            read()


def test_masks_and_positions_of_older_files_and_an_empty_configuration_are_no_reason(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    set_in_configuration(folder, quantization_config=None)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    weights["model.position_ids"] = torch.arange(4)[None]
    for name, dtype in ((NAME, torch.bfloat16), ("model.norm.weight", torch.float16)):
        weights[name] = weights[name].to(dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert set(weight_shapes(folder)) == set(weights)
