"""Models whose configuration and weights do not fit each other are refused before anything starts; their neighbours pass.

Without these checks, the trainer or the engines would fail minutes later, or would compute another model in silence.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import Change, check, edited
from safetensors.torch import load_file, save_file

from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import context_length, load_causal_lm
from async_grpo.modeling.wrong_models import refuse_wrong_model

BASE = {"rope_theta": 10000.0}


def config(**values: Any) -> Change:
    """Change values of config.json. The list of layer types is removed, so that the number of layers may change."""
    return edited("config.json", **({"layer_types": ...} | values))


def rope(**values: Any) -> Change:
    return config(rope_parameters=BASE | values)


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Change:
    """Change the weights by name."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def added(name: str, *shape: int) -> Change:
    return weights(lambda tensors: tensors.update({name: torch.zeros(shape)}))


def removed(name: str) -> Change:
    return weights(lambda tensors: tensors.pop(name))


WRONG = {
    "too few layers": (config(num_hidden_layers=3), "hold 12 .* model.layers.3.*num_hidden_layers is 3"),
    "too many layers": (config(num_hidden_layers=6), "lack 24 of the model's, such as model.layers.4"),
    "a weight is missing": (removed("model.norm.weight"), "lack 1 of the model's, such as model.norm.weight"),
    "a bias is missing": (removed("model.layers.0.self_attn.q_proj.bias"), "lack 1 .*q_proj.bias"),
    "a bias that the model lacks": (added("model.layers.0.mlp.up_proj.bias", 384), "hold 1 .*up_proj.bias"),
    "a bias of the head": (added("lm_head.bias", 266), "hold 1 .*lm_head.bias"),
    "weights of LoRA": (
        added("model.layers.0.self_attn.q_proj.lora_A.weight", 8, 128),
        "hold 1 .*lora_A.weight",
    ),
    "no head": (config(tie_word_embeddings=False), "lack 1 of the model's, such as lm_head.weight"),
    "heads that divide nothing": (config(num_attention_heads=3), r"q_proj.weight has the shape .128, 128."),
    "other heads of keys": (config(num_key_value_heads=4), "k_proj.weight has the shape .64, 128."),
    "another width": (config(hidden_size=64), "has the shape .266, 128. in the files, but .266, 64."),
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0, and at least 1"),
    "no heads of keys": (config(num_key_value_heads=0), "num_key_value_heads is 0, and at least 1"),
    "heads of no width": (config(head_dim=0), "head_dim is 0, and at least 1"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0, and at least 1"),
    "an unknown activation": (config(hidden_act="swiglu"), "the value 'swiglu' .hidden_act."),
    "an unknown type of positions": (
        rope(rope_type="ntk"),
        "rope_type 'ntk', which transformers does not know",
    ),
    "a misspelled type of positions": (rope(rope_type="yarm", factor=2.0), "did you mean yarn"),
    "the older name of the parameters": (
        config(rope_parameters=..., rope_theta=10000.0, rope_scaling={"type": "foo", "factor": 2.0}),
        "rope_type 'foo', which transformers does not know",
    ),
    "a base of 0": (rope(rope_theta=0), "rope_theta 0 for the rotary positions: write a number above 0"),
    "a base that is a text": (rope(rope_theta="10000"), "rope_theta '10000' for the rotary positions"),
    "a factor below 0": (rope(rope_type="linear", factor=-1.0), "factor -1.0 for the rotary positions"),
    "a factor that is a text": (rope(rope_type="linear", factor="2"), "factor '2' for the rotary positions"),
    "a classifier": (
        config(architectures=["Qwen2ForSequenceClassification"]),
        "architectures .'Qwen2ForSequenceClassification'.*none of them generates text",
    ),
    "a model without a head": (config(architectures=["Qwen2Model"]), "architectures .'Qwen2Model'."),
    "a model that sees what follows": (
        config(model_type="bert", architectures=["BertForMaskedLM"]),
        "architectures .'BertForMaskedLM'.*none of them generates text",
    ),
    "no class": (config(architectures=None), "architectures .., by which the engines choose"),
    "a pad token of another model": (config(pad_token_id=9999), "pad_token_id 9999, which is outside"),
}
RIGHT = {
    "unchanged": config(),
    "a type for each layer": edited("config.json", layer_types=["full_attention"] * 4),
    "a value head": added("v_head.weight", 1, 128),
    "a classifier's head": added("score.weight", 2, 128),
    "parts that see": added("model.visual.patch_embed.weight", 4, 4),
    "positions of an older file": added("model.layers.0.self_attn.rotary_emb.inv_freq", 16),
    "masks of an older file": added("model.layers.0.attn.masked_bias", 1),
    "a layer that predicts further tokens": lambda folder: (
        config(num_nextn_predict_layers=1)(folder),
        added("model.layers.4.eh_proj.weight", 4, 4)(folder),
    ),
    "such a layer under a name of its own": added("mtp.layers.0.mlp.up_proj.weight", 4, 4),
    "names without the first part": weights(
        lambda tensors: [tensors.update({name[6:]: tensors.pop(name)}) for name in list(tensors)]
    ),
    "the head beside equal embeddings": weights(
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    ),
    "another activation": config(hidden_act="gelu"),
    "positions by default": rope(rope_type="default"),
    "positions by a factor": rope(rope_type="linear", factor=2),
    "positions of Llama 3": rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    ),
    "the older name of positions": config(
        rope_parameters=..., rope_theta=10000.0, rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "the older name of a class": config(architectures=["LLaMAForCausalLM"]),
    "two classes": config(architectures=["Qwen2Model", "Qwen2ForCausalLM"]),
    "no pad token": config(pad_token_id=None),
    "a pad token that counts from the end": config(pad_token_id=-1),
    "no use of the cache": config(use_cache=False),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_does_not_fit_its_files_is_refused_at_the_start(folder, kind):
    change, words = WRONG[kind]
    change(folder)
    with pytest.raises(ConfigurationError, match=words):
        check(folder)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_model_that_fits_its_files_passes_and_loads(folder, kind):
    RIGHT[kind](folder)
    check(folder)
    load_causal_lm(folder, "float32")


def test_an_evaluation_compares_only_what_the_engines_read(folder):
    """Engines can serve kinds of models that transformers' causal language models do not have."""
    config(hidden_act="swiglu")(folder)
    refuse_wrong_model(folder, trains=False)
    config(architectures=["Qwen2Model"])(folder)
    with pytest.raises(ConfigurationError, match="none of them generates text"):
        refuse_wrong_model(folder, trains=False)


def test_a_head_that_differs_from_the_embeddings_to_which_it_is_tied_is_refused(folder):
    """The engines would ignore it, and transformers would use it."""

    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    weights(double)(folder)
    with pytest.raises(
        ConfigurationError, match="says tie_word_embeddings true, and the weights hold a head"
    ):
        load_causal_lm(folder, "float32")
    config(tie_word_embeddings=False)(folder)
    assert load_causal_lm(folder, "float32").lm_head.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("positions", "is_refused"), [(0, True), (-1, True), (1, True), (2, False), (64, False)]
)
def test_a_context_needs_room_for_a_prompt_and_a_completion(folder, positions, is_refused):
    config(max_position_embeddings=positions)(folder)
    if not is_refused:
        assert context_length(folder) == positions
        return
    with pytest.raises(ConfigurationError, match=f"max_position_embeddings {positions}, which has no room"):
        context_length(folder)
