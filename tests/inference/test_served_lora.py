"""What an engine that applies the policy's adapter (LoRA) is started with, refuses, and reads back."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_policy import SETTINGS
from transformers import Qwen3MoeConfig

pytest.importorskip("vllm")

from async_grpo.errors import ConfigurationError
from async_grpo.inference.config import EngineConfig
from async_grpo.inference.engine_arguments import engine_arguments
from async_grpo.inference.read_back_places import ReadBack
from async_grpo.inference.served_lora import lora_arguments
from async_grpo.messages import LoraSettings

MODEL = Path(__file__).resolve().parents[2] / "async_grpo" / "data" / "tiny-model"
LAYERS = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")

LORA = LoraSettings(4, 2.0, LAYERS, "adapter")


def arguments(options: str = "", model: Path = MODEL, rank: int = 4, sync: str = "adapter", layers=LAYERS):
    lora = LoraSettings(rank, 2.0, layers, sync)
    config = EngineConfig(model_path=str(model), engine_options=options)
    return engine_arguments(config, replace(SETTINGS, lora=lora), "")


@pytest.mark.parametrize(("rank", "reserved"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320), (512, 512)])
def test_an_engine_has_room_for_one_adapter_of_the_rank_in_the_layers_that_have_one(rank, reserved):
    made = arguments(rank=rank)
    assert made.enable_lora and made.max_loras == 1 and made.max_lora_rank == reserved
    assert made.lora_target_modules == ["q_proj", "up_proj"]


def test_engines_that_receive_merged_weights_know_nothing_of_the_adapter():
    assert not arguments(sync="merged").enable_lora
    assert not arguments(sync="merged", rank=1000, layers=("lm_head",)).enable_lora


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": 513}, "--lora-rank 513: vLLM serves adapters up to rank 512; with --lora-sync merged"),
        ({"layers": (*LAYERS, "lm_head")}, "cannot apply an adapter to lm_head; with --lora-sync merged"),
        ({"layers": ("model.embed_tokens",)}, "cannot apply an adapter to embed_tokens"),
        ({"options": "quantization=fp8"}, "an engine with quantized weights"),
        ({"options": "max_loras=2"}, "the run sets max_loras itself"),
        ({"options": "enable_lora=true"}, "--lora-rank"),
    ],
)
def test_an_adapter_that_no_engine_could_serve_or_prove_is_refused_by_name(changes, problem):
    with pytest.raises(ConfigurationError, match=problem):
        arguments(**changes)


def test_a_model_folder_with_quantized_weights_is_refused(tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().rstrip().removesuffix("}")
    (tmp_path / "config.json").write_text(config + ', "quantization_config": {"quant_method": "fp8"}}')
    with pytest.raises(ConfigurationError, match="an engine with quantized weights"):
        arguments(model=tmp_path)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_model_with_experts_is_refused_on_a_cpu_alone(tmp_path, monkeypatch, has_gpu):
    for file in MODEL.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = Qwen3MoeConfig(vocab_size=300, num_hidden_layers=2, num_experts=4)
    config.save_pretrained(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    if has_gpu:
        assert lora_arguments(EngineConfig(model_path=str(tmp_path)), LORA)["enable_lora"]
        return
    with pytest.raises(
        ConfigurationError, match="on a CPU, vLLM cannot compute experts .*--lora-sync merged"
    ):
        lora_arguments(EngineConfig(model_path=str(tmp_path)), LORA)


# -- read-back

A, B = (f"base_model.model.model.layers.0.mlp.up_proj.lora_{matrix}.weight" for matrix in "AB")


def read_back() -> ReadBack:
    """Of an engine of two processes that each hold a part of the base."""
    made = ReadBack()
    made.begin(
        [({"model.layers.0.mlp": 5, "lm_head": 7}, {}), ({"model.layers.0.mlp": 2**64 - 1, "lm_head": 0}, {})]
    )
    return made


def compare(made: ReadBack, mlp: int = 5, used_b: int = 3) -> None:
    made.compare(
        [
            ({"model.layers.0.mlp": mlp, "lm_head": 7}, {}),
            ({"model.layers.0.mlp": 2**64 - 1, "lm_head": 0}, {}),
        ]
    )
    received = {A: 11, B: 13}
    made.compare_adapter([({A: 11, B: 10}, received), ({A: 0, B: used_b}, received)])


def test_tensors_of_an_adapter_are_compared_one_by_one_from_the_first_update_on():
    made = read_back()
    compare(made, used_b=4)
    assert made.is_in_use(A) and not made.is_in_use(B) and made.is_readable(A) and made.is_readable(B)
    assert made.not_in_use(apart_from=[A, B]) == set() and made.not_in_use(apart_from=[A]) == {B}
    compare(made)
    assert made.is_in_use(A) and made.is_in_use(B)


def test_a_base_that_differs_from_the_start_is_a_place_of_no_received_tensor():
    made = read_back()
    compare(made, mlp=6)
    assert made.is_in_use(A) and made.not_in_use(apart_from=[A, B]) == {"model.layers.0.mlp"}
    compare(made)
    assert made.not_in_use(apart_from=[A, B]) == set()


def test_a_place_of_the_base_that_differs_when_it_first_receives_weights_cannot_be_read():
    """Such as packed experts. All other places must be in use from then on."""
    made = ReadBack()
    made.begin([({"model.layers.0.mlp": 5, "model.layers.0.mlp.experts": 1}, {})])

    def receive(mlp: int, used_mlp: int, experts: int) -> None:
        arrived = {"model.layers.0.mlp": mlp, "model.layers.0.mlp.experts": experts}
        made.compare([({"model.layers.0.mlp": used_mlp, "model.layers.0.mlp.experts": 1}, arrived)])

    gate, expert = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.3.up_proj.weight"
    receive(mlp=5, used_mlp=5, experts=8)
    assert made.is_readable(gate) and not made.is_readable(expert) and made.is_in_use(expert)
    receive(mlp=6, used_mlp=5, experts=9)
    assert not made.is_in_use(gate) and made.is_in_use(expert)
