"""Small GGUF files made here: what is converted is the same model with the same tokens, and all else is refused by name."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.data import create_model, gguf_model, smollm2
from async_grpo.data.gguf_model import CannotMakeModel

sys.path.append(f"{sys.prefix}/gguf")  # scripts/setup_extras installs it there
gguf = pytest.importorskip("gguf")

HIDDEN_SIZE, HEAD_SIZE, INTERMEDIATE_SIZE = 64, 32, 96
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
Change = Callable[[Any], None]


def byte_tokens() -> list[str]:
    """A special token, one token for each byte, and the merged token of a blank and a t."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return ["<|end|>", *bytes_to_unicode().values(), "Ġt"]


def shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    layer = {
        "attn_q": (HIDDEN_SIZE, HIDDEN_SIZE),
        "attn_k": (HEAD_SIZE, HIDDEN_SIZE),
        "attn_v": (HEAD_SIZE, HIDDEN_SIZE),
        "attn_output": (HIDDEN_SIZE, HIDDEN_SIZE),
        "ffn_gate": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "ffn_up": (INTERMEDIATE_SIZE, HIDDEN_SIZE),
        "ffn_down": (HIDDEN_SIZE, INTERMEDIATE_SIZE),
        "attn_norm": (HIDDEN_SIZE,),
        "ffn_norm": (HIDDEN_SIZE,),
    }
    found = {"token_embd.weight": (len(byte_tokens()), HIDDEN_SIZE), "output_norm.weight": (HIDDEN_SIZE,)}
    for number in range(num_layers):
        found |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return found


def write_gguf(
    path: Path,
    architecture: str = "llama",
    tokenizer: str = "gpt2",
    split: str = "gpt-2",
    quantization: str | None = None,
    without: tuple[str, ...] = (),
    further_tensors: tuple[str, ...] = (),
    change: Change = lambda writer: None,
) -> Path:
    """Write a Llama of two layers with random weights; the arguments say in what it differs."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("toy")
    writer.add_license("mit")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_feed_forward_length(INTERMEDIATE_SIZE)
    writer.add_head_count(HIDDEN_SIZE // HEAD_SIZE)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(split)
    writer.add_token_list(byte_tokens())
    writer.add_token_types([3] + [1] * (len(byte_tokens()) - 1))
    if "merges" not in without:
        writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    change(writer)
    random = np.random.default_rng(0)
    tensors = shapes(2) | dict.fromkeys(further_tensors, (HIDDEN_SIZE,))
    for name, shape in tensors.items():
        weights = random.normal(0.0, 0.2, shape).astype(np.float32)
        if name in without:
            continue
        if quantization is None or len(shape) == 1:
            writer.add_tensor(name, weights)
        else:
            kind = gguf.GGMLQuantizationType[quantization]
            writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_logits(path: Path, token_ids: list[int]) -> np.ndarray:
    """The logits of a Llama as llama.cpp computes them: rotary positions turn neighbors, and not the halves of a head."""
    weights = {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }

    def norm(states: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return states / np.sqrt((states**2).mean(-1, keepdims=True) + 1e-5) * scale

    positions = np.arange(len(token_ids))
    angles = np.outer(positions, 10_000.0 ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))
    turns = np.exp(1j * angles)[:, None, :]

    def turned(states: np.ndarray) -> np.ndarray:
        pairs = states.reshape(len(states), -1, HEAD_SIZE // 2, 2)
        rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * turns
        return np.stack([rotated.real, rotated.imag], -1).reshape(len(states), -1, HEAD_SIZE)

    states = weights["token_embd"][token_ids]
    mask = np.where(positions[:, None] >= positions[None, :], 0.0, -np.inf)
    for number in range(2):
        layer = {
            name: weights[f"blk.{number}.{name}"] for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        inputs = norm(states, weights[f"blk.{number}.attn_norm"])
        queries, keys = turned(inputs @ layer["attn_q"].T), turned(inputs @ layer["attn_k"].T)
        values = inputs @ layer["attn_v"].T
        scores = np.einsum("qhd,kd->hqk", queries, keys[:, 0]) / HEAD_SIZE**0.5 + mask
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,kd->qhd", shares, values).reshape(len(token_ids), -1)
        states = states + mixed @ layer["attn_output"].T
        inputs = norm(states, weights[f"blk.{number}.ffn_norm"])
        gate = inputs @ weights[f"blk.{number}.ffn_gate"].T
        inner = gate / (1 + np.exp(-gate)) * (inputs @ weights[f"blk.{number}.ffn_up"].T)
        states = states + inner @ weights[f"blk.{number}.ffn_down"].T
    return norm(states, weights["output_norm"]) @ weights.get("output", weights["token_embd"]).T


@pytest.mark.parametrize(
    ("quantization", "dtype"), [(None, "float32"), ("Q8_0", "bfloat16"), ("Q4_0", "bfloat16")]
)
def test_the_folder_is_the_same_model_with_the_same_tokens_and_says_its_license(
    quantization, dtype, tmp_path
):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_gguf(tmp_path / "toy.gguf", quantization=quantization)
    gguf_model.make_from_gguf(tmp_path / "model", path)
    about = (tmp_path / "model" / "README.md").read_text()
    assert "toy, license mit" in about and gguf_model.digest(path) in about and dtype in about
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == dtype
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    token_ids = tokenizer.encode("a test")
    assert [tokenizer.convert_ids_to_tokens(number) for number in token_ids] == ["a", "Ġt", "e", "s", "t"]
    assert tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|end|>"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    logits = model(torch.tensor([token_ids])).logits[0].detach().numpy()
    tolerance = 1e-4 if dtype == "float32" else 0.15
    np.testing.assert_allclose(logits, reference_logits(path, token_ids), atol=tolerance)


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'; only 'llama' is known"),
        ({"tokenizer": "t5"}, "tokenizer is of the kind 't5'; known: gpt2, llama"),
        ({"tokenizer": "llama"}, "lacks the field 'tokenizer.ggml.scores'"),
        ({"without": ("merges",)}, "lacks the field 'tokenizer.ggml.merges'"),
        ({"split": "tekken"}, "splits texts by the rule 'tekken'; known: default"),
        ({"further_tensors": ("rope_freqs.weight",)}, "unknown tensors: rope_freqs.weight"),
        ({"without": ("blk.1.ffn_up.weight",)}, "holds 19 tensors, where 2 layers have 20"),
        ({"change": lambda writer: writer.add_expert_count(8)}, "a mixture of 8 experts"),
        (
            {"change": lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            "scales rotary positions by the rule 'yarn'",
        ),
        (
            {"change": lambda writer: writer.add_key_length(16)},
            "attention.key_length is 16, and not the head size 32",
        ),
        ({"change": lambda writer: writer.add_uint16("split.count", 3)}, "one of 3 parts"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name_and_leaves_nothing(difference, message, tmp_path):
    path = write_gguf(tmp_path / "toy.gguf", **difference)
    (tmp_path / "place").mkdir()
    with pytest.raises(CannotMakeModel, match=message):
        gguf_model.make_from_gguf(tmp_path / "place" / "model", path)
    assert list((tmp_path / "place").iterdir()) == []


def test_a_type_of_weights_that_the_reader_does_not_know_is_refused_with_the_tensor(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "toy.gguf", quantization="Q8_0")

    def dequantize(data: Any, kind: Any) -> Any:
        if kind.name == "Q8_0":
            raise NotImplementedError
        return data

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    with pytest.raises(CannotMakeModel, match=r"cannot read the type Q8_0 of token_embd\.weight"):
        gguf_model.read_facts(path)


@pytest.mark.parametrize("content", [b"", b"a text", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
def test_a_file_that_is_no_gguf_is_refused_with_its_name(content, tmp_path):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    with pytest.raises(CannotMakeModel, match=r"file\.gguf cannot be read as GGUF"):
        gguf_model.read_facts(path)


def test_a_tokenizer_that_differs_from_the_vocabulary_of_the_file_is_refused(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "toy.gguf")
    facts = gguf_model.convert(path, tmp_path / "model")
    for change, message in (
        (
            {"tokens": [*facts.tokens[:-1], "Ġs"]},
            "258 tokens, the GGUF file 258; 1 differ, such as 'Ġt' for 'Ġs'",
        ),
        ({"tokens": facts.tokens[:-1]}, "258 tokens, the GGUF file 257; 0 differ, some are missing"),
        ({"chat_template": "{{ messages }}"}, "chat template"),
    ):
        with pytest.raises(CannotMakeModel, match=message):
            gguf_model.check_tokens(gguf_model.GGUFFacts(**{**vars(facts), **change}), tmp_path / "model")


def run(*arguments: object) -> Any:
    typer_testing = pytest.importorskip("typer.testing")
    commands = importlib.import_module("async_grpo.data.commands")
    return typer_testing.CliRunner().invoke(
        commands.app, ["model", *map(str, arguments)], env={"COLUMNS": "1000"}
    )


def test_the_command_converts_any_file_once_into_the_cache_outside_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "my model.gguf")
    folder = tmp_path / "cache" / "async-grpo" / f"my-model-{gguf_model.digest(path)[:12]}"
    done = run("--gguf", path)
    assert done.exit_code == 0, done.output
    assert f"model folder: {folder}" in done.output and "license mit" in done.output
    monkeypatch.setattr(gguf_model, "make_from_gguf", None)  # not called again
    assert run("--gguf", path).exit_code == 0
    monkeypatch.undo()
    done = run("smollm2", "--gguf", path, "--output", tmp_path / "named")
    assert done.exit_code == 0 and f"is not the file of {smollm2.REQUIREMENT}" in done.output
    assert "asked 'What is the capital of France?', it answers" in done.output


def test_the_command_refuses_an_unknown_name_and_a_missing_file(tmp_path):
    done = run("gpt5")
    assert done.exit_code == 2 and "known: smollm2. For another model give --gguf FILE" in done.output
    done = run("--gguf", tmp_path / "nowhere.gguf")
    assert done.exit_code == 2 and "nowhere.gguf is no file" in done.output
    assert create_model.SMOLLM2 == "smollm2"
