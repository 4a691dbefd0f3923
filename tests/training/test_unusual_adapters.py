"""Adapters and options of LoRA that would train something else than they say are refused, by name, with a way out."""

import json
import re
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_policy import save_tiny_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from async_grpo.config.lora import _has_part, lora_settings
from async_grpo.config.resume import data_digests
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError
from async_grpo.launch.exported_models import export_adapter
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel, value_head_tensors
from async_grpo.training.export import VALUE_HEAD_FILE, load_value_head

TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    save_tiny_model(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    options = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, options).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def folder(made_once, tmp_path):
    shutil.copytree(made_once / "model", tmp_path / "model")
    shutil.copytree(made_once / "adapter", tmp_path / "adapter")
    return tmp_path


def settings_of(folder, **options):
    model = str(folder / "model")
    config = RunConfig(model_name_or_path=model, data_path="x", reward_fns="format", **options)
    return lora_settings(config, model)


def change_config(folder, **fields):
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": 0}, "lora_alpha is 0: it must be a number above 0"),
        ({"lora_alpha": -8}, "lora_alpha is -8"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"r": 10**400, "use_rslora": True}, "r is 1000"),
        ({"r": True}, "r is True: it must be a whole number"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
        ({"use_dora": True}, "use_dora is True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    ],
)
def test_a_configuration_that_computes_something_else_is_refused_by_its_field(folder, fields, message):
    change_config(folder, **fields)
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        settings_of(folder, init_adapter=str(folder / "adapter"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor * float("nan"), "are no finite numbers"),
        (lambda tensor: tensor + float("inf"), "are no finite numbers"),
        (lambda tensor: tensor.to(torch.int8), "of the type torch.int8: save it as float32"),
        (lambda tensor: tensor.flatten(), "of the shape"),
    ],
)
def test_a_tensor_that_is_no_matrix_of_numbers_is_refused_by_its_name(folder, change, message):
    path = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, TENSOR: change(tensors[TENSOR])}, path)
    with pytest.raises(ConfigurationError, match=message) as refused:
        settings_of(folder, init_adapter=str(folder / "adapter"))
    assert TENSOR in str(refused.value)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["base_model.model.lm_head.base_layer.weight"], "'base_model.model.lm_head.base_layer.weight', which is no"),
        ([], "holds no tensor"),
        (
            ["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"],
            "'lm_head', which is the head",
        ),
        (["base_model.model.model.norm.lora_A.weight"], "'model.norm', which is the head or no linear layer"),
    ],
)  # fmt: skip
def test_tensors_of_other_layers_are_refused_by_name(folder, names, message):
    save_file({name: torch.zeros(4, 4) for name in names}, folder / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match=message):
        settings_of(folder, init_adapter=str(folder / "adapter"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": 10**9}, "--lora-rank 1000000000: .* give a rank between 1 and "),
        (
            {"lora_rank": 4, "lora_targets": "lm_head"},
            "'lm_head' is the head, which gets no adapter; .*q_proj",
        ),
        ({"lora_rank": 4, "lora_targets": "embed_tokens"}, "'embed_tokens' is no linear layer; "),
        ({"lora_rank": 4, "lora_targets": "proj"}, "'proj' is no layer of the model; "),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_before_anything_starts(folder, options, message):
    with pytest.raises(ConfigurationError, match=message):
        settings_of(folder, **options)


def test_blanks_and_empty_names_among_the_targets_do_no_harm(folder):
    settings = settings_of(folder, lora_rank=4, lora_targets=" q_proj ,,v_proj,")
    assert {name.rpartition(".")[2] for name in settings.layers} == {"q_proj", "v_proj"}


def test_a_rank_that_no_engine_serves_is_refused_before_anything_starts(folder):
    save_tiny_model(folder / "model", intermediate_size=700)
    with pytest.raises(ConfigurationError, match="at most rank 512, not 600: .*--lora-sync merged"):
        settings_of(folder, lora_rank=600, lora_sync="adapter")
    assert settings_of(folder, lora_rank=600).rank == 600


@pytest.mark.parametrize(("base", "is_warned"), [("org/model", False), ("org/another", True)])
def test_an_adapter_of_another_base_is_noticed(folder, caplog, base, is_warned):
    change_config(folder, base_model_name_or_path=base)
    settings_of(folder, init_adapter=str(folder / "adapter"))
    assert (f"was trained on '{base}'" in caplog.text) == is_warned


def test_a_base_from_the_cache_of_the_hub_is_known_by_its_name():
    assert _has_part("/cache/models--Qwen--Qwen3-4B/snapshots/0f1e", "Qwen3-4B")
    assert not _has_part("/cache/models--Qwen--Qwen3-4B-Base/snapshots/0f1e", "Qwen3-4B")


def test_experts_without_an_adapter_are_named(tmp_path, caplog):
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    settings = settings_of(tmp_path, lora_rank=4)
    assert {name.rpartition(".")[2] for name in settings.layers} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "LoRA: experts.down_proj, experts.gate_up_proj get no adapter and stay frozen" in caplog.text


def test_a_run_goes_on_only_with_the_scale_with_which_its_adapter_began(folder):
    data = folder / "data.jsonl"
    data.write_text('{"prompt": "x"}\n')
    config = RunConfig(
        model_name_or_path=str(folder / "model"),
        data_path=str(data),
        reward_fns="format",
        init_adapter=str(folder / "adapter"),
    )
    digests = data_digests(config)
    assert data_digests(config) == digests
    change_config(folder, lora_alpha=16)
    changed = data_digests(config)
    assert {name for name in digests if digests[name] != changed[name]} == {"init_adapter"}


def test_a_merged_model_has_the_value_head_of_the_adapter(folder):
    path = folder / "adapter" / VALUE_HEAD_FILE
    path.parent.mkdir()
    policy = PolicyModel(load_causal_lm(folder / "model", "float32"), value_head=True)
    torch.nn.init.normal_(policy.value_head.weight)
    expected = {name: tensor.detach().clone() for name, tensor in value_head_tensors(policy).items()}
    save_file(expected, path)
    export_adapter(
        folder / "adapter", folder / "merged", base=str(folder / "model"), dtype="float32", in_4bit=False
    )
    again = PolicyModel(load_causal_lm(folder / "merged", "float32"), value_head=True)
    assert load_value_head(again, folder / "merged")
    tensors = value_head_tensors(again)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
