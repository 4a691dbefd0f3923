"""Folders that are no whole model, or whose model cannot be trained exactly: refused with the reason and the way out.

Beside each kind stand neighbours, which look similar and must load.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import Change, check, edited
from safetensors.torch import load_file, save_file

from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import load_causal_lm, stop_token_ids
from async_grpo.modeling.policy import PolicyModel
from async_grpo.modeling.wrong_models import refuse_wrong_model

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3000000\n"
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen2.5-0.5B", "r": 8}
EMPTY_SAFETENSORS = b"\x02\0\0\0\0\0\0\0{}"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))


def with_file(name: str, content: str | bytes = b"") -> Change:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def without(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def all_of(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def sharded(*, missing: tuple[int, ...] = (), index: bool = True, total: int = 3) -> Change:
    """Split the weights into several files."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        weight_map = {}
        for number in range(1, total + 1):
            file = f"model-{number:05}-of-{total:05}.safetensors"
            part = {name: weights[name] for name in sorted(weights)[number - 1 :: total]}
            weight_map |= dict.fromkeys(part, file)
            if number not in missing:
                save_file(part, folder / file, metadata={"format": "pt"})
        if index:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return change


def adapter_alone(**config: Any) -> Change:
    def change(folder: Path) -> None:
        without("config.json", "generation_config.json", WEIGHTS)(folder)
        (folder / "adapter_config.json").write_text(json.dumps(ADAPTER | config))
        (folder / "adapter_model.safetensors").write_bytes(EMPTY_SAFETENSORS)

    return change


def moved_below(*parts: str) -> Change:
    """Leave the folder itself without a model, which lies deeper."""

    def change(folder: Path) -> None:
        model = folder.rename(folder.with_name("moved"))
        folder.joinpath(*parts).parent.mkdir(parents=True)
        model.rename(folder.joinpath(*parts))

    return change


def cut_weights(num_bytes: int) -> Change:
    return lambda folder: os.truncate(folder / WEIGHTS, num_bytes)


adapter_config = with_file("adapter_config.json", json.dumps(ADAPTER))
BASE = "its base is 'Qwen/Qwen2.5-0.5B'"
REFUSED_FOLDERS: dict[str, tuple[Change, str, str]] = {  # change, reason, way out
    "adapter alone": (adapter_alone(), BASE, "async-grpo export ADAPTER --merged"),
    "adapter of a folder": (adapter_alone(base_model_name_or_path="../tiny"), "base is '../tiny'", "merge"),
    "adapter without a base": (adapter_alone(base_model_name_or_path=None), "not named in it", "merge"),
    "adapter of another kind": (adapter_alone(peft_type="IA3"), BASE, "--init-adapter ADAPTER"),
    "adapter in a pickle": (
        all_of(adapter_alone(), without("adapter_model.safetensors"), with_file("adapter_model.bin")),
        BASE,
        "merge",
    ),
    "adapter whose configuration is broken": (
        all_of(adapter_alone(), with_file("adapter_config.json", "{")),
        "holds an adapter",
        "merge",
    ),
    "adapter beside a model": (adapter_config, BASE, "remove adapter_config.json"),
    "adapter with weights beside a model": (
        all_of(adapter_config, with_file("adapter_model.safetensors", EMPTY_SAFETENSORS)),
        BASE,
        "remove adapter_config.json and adapter_model.safetensors",
    ),
    "weights of an adapter beside a model": (
        with_file("adapter_model.safetensors", EMPTY_SAFETENSORS),
        "weights of an adapter",
        "remove the file",
    ),
    "GGUF alone": (
        all_of(without("config.json", WEIGHTS), with_file("tiny-Q4_K_M.gguf", b"GGUF")),
        "tiny-Q4_K_M.gguf, in GGUF, the format of llama.cpp",
        "data model --gguf FILE",
    ),
    "GGUF for the weights": (
        all_of(without(WEIGHTS), with_file("tiny.gguf", b"GGUF")),
        "(tiny.gguf) are in GGUF",
        "hf download",
    ),
    "weights of TensorFlow": (
        all_of(without(WEIGHTS), with_file("tf_model.h5", b"x")),
        "format of TensorFlow",
        "in safetensors",
    ),
    "weights of Flax": (
        all_of(without(WEIGHTS), with_file("flax_model.msgpack", b"x")),
        "format of Flax",
        "in safetensors",
    ),
    "no weights": (without(WEIGHTS), "holds no weights", "hf download"),
    "pickled weights": (
        all_of(without(WEIGHTS), with_file("pytorch_model.bin", b"x")),
        "are pickles",
        "convert",
    ),
    "pointer for the weights": (with_file(WEIGHTS, LFS_POINTER), "pointer of git-lfs", "git lfs pull"),
    "pointer for a shard": (
        all_of(sharded(), with_file("model-00002-of-00003.safetensors", LFS_POINTER)),
        "model-00002-of-00003.safetensors is a pointer of git-lfs",
        "git lfs pull",
    ),
    "pointer for the tokenizer": (
        with_file("tokenizer.json", LFS_POINTER),
        "tokenizer.json is a pointer of git-lfs",
        "git lfs pull",
    ),
    "web page for the weights": (
        with_file(WEIGHTS, "<!DOCTYPE html>\n<html>"),
        'begins with "<!DOCTYPE html>',
        "hf download",
    ),
    "message for the weights": (with_file(WEIGHTS, "Entry not found"), '"Entry not found"', "hf download"),
    "empty weights": (with_file(WEIGHTS), "the file is empty", "hf download"),
    "weights cut in the header": (cut_weights(500), "cannot be read", "hf download"),
    "weights cut in the middle": (cut_weights(1_000_000), "cannot be read", "hf download"),
    "weights cut at the end": (lambda f: cut_weights((f / WEIGHTS).stat().st_size - 1)(f), "cannot be read", "hf"),
    "shard missing": (sharded(missing=(2,)), "model-00002-of-00003.safetensors", "hf download"),
    "last shard missing": (sharded(missing=(3,)), "model-00003-of-00003.safetensors", "hf download"),
    "shard missing, no index": (
        sharded(missing=(2,), index=False),
        "has 2 of the 3 files of its weights, and lacks model-00002-of-00003.safetensors",
        "hf download",
    ),
    "all but one shard missing, no index": (
        sharded(missing=(1, 2, 3), index=False, total=4),
        "has 1 of the 4 files of its weights, and lacks model-00001-of-00004.safetensors",
        "hf download",
    ),
    "index missing": (sharded(index=False), f"neither {WEIGHTS} nor {INDEX}", "hf download"),
    "weights under another name": (
        lambda f: (f / WEIGHTS).rename(f / "weights.safetensors"),
        f"neither {WEIGHTS} nor",
        f"must be named {WEIGHTS}",
    ),
    "no tokenizer": (without("tokenizer.json", "tokenizer_config.json"), "has no tokenizer", "tokenizer.json"),
    "no vocabulary": (without("tokenizer.json"), "has no tokenizer", "into its folder"),
    "half a vocabulary": (
        all_of(without("tokenizer.json"), with_file("vocab.json", '{"a": 0}')),
        "the tokenizer in",
        "copy the tokenizer's files",
    ),
    "no configuration": (without("config.json"), "has no config.json", "hf download"),
    "checkpoints of a training": (moved_below("checkpoint-10"), "models lie in", "checkpoint-10"),
    "models of a run": (moved_below("hf_format", "samples_64"), "models lie in", "hf_format/samples_64"),
    "cache of the hub": (moved_below("snapshots", "a1b2c3"), "models lie in", "snapshots/a1b2c3"),
}  # fmt: skip
NEIGHBOURING_FOLDERS: dict[str, Change] = {
    "adapter in a folder below": with_file("adapter/adapter_config.json", json.dumps(ADAPTER)),
    "old configuration of an adapter": with_file("adapter_config.json.bak", json.dumps(ADAPTER)),
    "pickled adapter without its configuration": with_file("adapter_model.bin"),
    "notes about an adapter": with_file("lora.md", "Merged with peft."),
    "arguments of a training": with_file("training_args.bin"),
    "GGUF beside the weights": with_file("tiny-Q4_K_M.gguf", b"GGUF"),
    "TensorFlow beside the weights": with_file("tf_model.h5"),
    "pickles beside the weights": with_file("pytorch_model.bin"),
    "ONNX in a folder below": with_file("onnx/model.onnx"),
    "pointers for files that nothing needs": all_of(
        with_file("README.md", LFS_POINTER), with_file("onnx/model.onnx", LFS_POINTER)
    ),
    "shards": sharded(),
    "two shards": sharded(total=2),
    "one shard": sharded(total=1),
    "weights behind a link": all_of(
        lambda f: (f / WEIGHTS).rename(f.parent / "blob"), lambda f: (f / WEIGHTS).symlink_to("../blob")
    ),
    "only tokenizer.json": without("tokenizer_config.json"),
    "template within the tokenizer's configuration": all_of(
        without("chat_template.jinja"), edited("tokenizer_config.json", chat_template="{{ messages }}")
    ),
    "checkpoints below": with_file("checkpoint-10/config.json", "{}"),
    "no generation_config.json": without("generation_config.json"),
}


@pytest.mark.parametrize("kind", REFUSED_FOLDERS)
def test_a_folder_that_is_no_whole_model_is_refused_with_the_reason_and_the_way_out(folder, kind):
    change, reason, way_out = REFUSED_FOLDERS[kind]
    change(folder)
    with pytest.raises(ConfigurationError) as refused:
        check(folder)
    message = str(refused.value)
    assert reason in message and way_out in message and str(folder) in message


@pytest.mark.parametrize("kind", NEIGHBOURING_FOLDERS)
def test_what_only_looks_like_it_loads(folder, kind):
    NEIGHBOURING_FOLDERS[kind](folder)
    check(folder)
    load_causal_lm(folder, "float32")


@pytest.mark.parametrize("name", [WEIGHTS, "tiny.gguf"])
def test_a_file_in_the_place_of_a_folder(folder, name):
    with_file("tiny.gguf", b"GGUF")(folder)
    way_out = f"give its folder, {folder}" if name == WEIGHTS else "data model --gguf FILE"
    with pytest.raises(ConfigurationError, match=way_out):
        check(folder / name)


OUTSIDE = "outside the model's vocabulary of 266 tokens"
WRONG_END_TOKENS = [  # value of eos_token_id, the part that the message shows
    ("258", "'258' is no token id"),
    ("<|im_end|>", "'<|im_end|>' is no token id"),
    (["258"], "'258' is no token id"),
    ([258, "256"], "'256' is no token id"),
    (258.0, "258.0 is no token id"),
    (True, "True is no token id"),
    ([[258]], "[258] is no token id"),
    ({"id": 258}, "{'id': 258} is no token id"),
    (266, f"266 is {OUTSIDE}"),
    (151_645, f"151645 is {OUTSIDE}"),
    ([258, 9999], f"9999 is {OUTSIDE}"),
    (-1, f"-1 is {OUTSIDE}"),
    ([258, -100], f"-100 is {OUTSIDE}"),
]
END_TOKENS = [  # value in generation_config.json, all end tokens
    (258, (258,)),
    ([258], (258,)),
    ([258, 256], (256, 258)),
    ([258, 258], (258,)),
    ([258, None], (258,)),
    (None, (258,)),
    ([], (258,)),
    (0, (0, 258)),
    (265, (258, 265)),
    (..., (258,)),
]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(("value", "reason"), WRONG_END_TOKENS)
def test_an_end_token_that_no_completion_could_have_is_refused_by_file_and_value(folder, file, value, reason):
    edited(file, eos_token_id=value)(folder)
    with pytest.raises(ConfigurationError) as refused:
        check(folder)
    assert reason in str(refused.value) and file in str(refused.value)
    assert "number" in str(refused.value)  # the way out


@pytest.mark.parametrize(("value", "ids"), END_TOKENS)
def test_end_tokens_of_the_vocabulary_are_collected(folder, value, ids):
    edited("generation_config.json", eos_token_id=value)(folder)
    check(folder)
    assert stop_token_ids(folder) == ids


WINDOW = {"use_sliding_window": True, "sliding_window": 8}
FULL, WINDOWED = "full_attention", "sliding_attention"
MISTRAL = {"model_type": "mistral", "layer_types": ..., "head_dim": 32}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def rope(rope_type: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, "rope_type": rope_type, "factor": 2.0, **values}}


WRONG_CONFIGURATIONS = [  # values of config.json, reason, way out
    ({**WINDOW, "layer_types": [WINDOWED] * 4}, "sliding_window 8", "no sample of the run is longer than 8"),
    ({**WINDOW, "layer_types": [FULL, FULL, WINDOWED, WINDOWED]}, "sliding_window 8", "sliding_window to null"),
    ({**WINDOW, "layer_types": [WINDOWED, FULL] * 2}, f"['{FULL}', '{WINDOWED}']", "full attention"),
    ({**WINDOW, "layer_types": ..., "max_window_layers": 0}, "sliding_window 8", "layer_types to full_attention"),
    ({**WINDOW, "layer_types": ..., "max_window_layers": 3}, "sliding_window 8", "use a model with full attention"),
    ({**MISTRAL, "sliding_window": 4096}, "sliding_window 4096", "longer than 4096 tokens"),
    ({"model_type": "gemma3_text", "sliding_window": 512, "layer_types": [WINDOWED] * 3 + [FULL], "head_dim": 32},
     "sliding_window 512", "use a model with full attention"),
    ({"dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192}},
     "dual_chunk_attention_config in config.json", "longer than 262144 tokens, remove"),
    ({"dual_chunk_attention_config": True}, "the engines would attend by chunks", "use a model without"),
    ({"layer_types": [FULL, "linear_attention"] * 2}, "'linear_attention'", "use a model with full attention"),
    ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 2]], "num_layers": 4},
     "does not use transformers' attention interface", "docs/models.md"),
    ({"model_type": "t5"}, "no causal language model of the model_type 't5'", "docs/models.md"),
    ({"attention_dropout": 0.1}, "attention_dropout 0.1", "set it to 0 in config.json"),
    (rope("dynamic", original_max_position_embeddings=16), "rope_type 'dynamic'", "another rope_type"),
    ({"model_type": "cohere", "logit_scale": 0.0625}, "plain linear head", "use a model without"),
]  # fmt: skip
RIGHT_CONFIGURATIONS = [
    {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 4096, "layer_types": ...},
    {**WINDOW, "layer_types": [FULL] * 4},
    {"use_sliding_window": True, "sliding_window": 8, "layer_types": ..., "max_window_layers": 4},
    {"use_sliding_window": True, "sliding_window": None},
    {"sliding_window": ..., "use_sliding_window": ..., "max_window_layers": ..., "layer_types": ...},
    rope("linear"),
    rope("yarn", original_max_position_embeddings=256),
    {"rope_parameters": ..., "rope_theta": 5e5},
    {"attention_dropout": 0.0, "classifier_dropout": 0.1},
    {"max_position_embeddings": 64},
    {"dual_chunk_attention_config": None},
    {"dual_chunk_attention_config": {}},
]


@pytest.mark.parametrize(("values", "reason", "way_out"), WRONG_CONFIGURATIONS)
def test_a_model_that_cannot_be_packed_is_refused_before_its_weights_are_read(
    folder, values, reason, way_out
):
    edited("config.json", **values)(folder)
    (folder / WEIGHTS).unlink()  # the configuration is looked at first
    with pytest.raises(ConfigurationError) as refused:
        check(folder)
    assert reason in str(refused.value) and way_out in str(refused.value)


@pytest.mark.parametrize("values", RIGHT_CONFIGURATIONS)
def test_a_similar_model_is_packed(folder, values):
    edited("config.json", **values)(folder)
    check(folder)
    PolicyModel(load_causal_lm(folder, "float32"))


def test_the_positions_of_gemma_s_layers_are_not_changed_by_the_way_out(folder):
    """Its layers with a window have other rotary positions, so that they cannot become layers of full attention."""
    edited(
        "config.json",
        model_type="gemma3_text",
        layer_types=[WINDOWED, FULL] * 2,
        sliding_window=512,
        rope_parameters={WINDOWED: DEFAULT_ROPE, FULL: DEFAULT_ROPE},
    )(folder)
    with pytest.raises(ConfigurationError, match="use a model with full attention$"):
        check(folder)


def test_an_evaluation_takes_models_that_cannot_be_packed(folder):
    edited("config.json", **WINDOW, layer_types=[WINDOWED] * 4)(folder)
    refuse_wrong_model(folder, trains=False)


@pytest.mark.parametrize("vocab_size", [260, 100, 512])
def test_a_vocabulary_that_does_not_fit_the_weights_is_refused_before_they_are_loaded(folder, vocab_size):
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert size != vocab_size
    edited("config.json", vocab_size=vocab_size)(folder)
    with pytest.raises(
        ConfigurationError,
        match=rf"vocab_size {vocab_size}, and \S+embed_tokens.weight has rows for {size} tokens",
    ):
        refuse_wrong_model(folder, trains=False)


def test_other_weights_may_have_any_number_of_rows(folder):
    weights = load_file(folder / WEIGHTS)
    size = len(weights["model.embed_tokens.weight"])
    weights["model.embed_tokens_per_layer.weight"] = torch.zeros(size + 1, 4)
    weights["visual.wte.bias"] = torch.zeros(3)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    refuse_wrong_model(folder, trains=True)


@pytest.mark.parametrize(
    ("path", "has_hint"), [("Qwen/Qwen2.5-0.5B", True), ("/no/model", False), ("no-model", False)]
)
def test_a_name_of_the_hub_is_not_fetched_everywhere_and_that_is_said(path, has_hint):
    with pytest.raises(ConfigurationError, match="is not a folder.*hf download") as refused:
        refuse_wrong_model(path, trains=True)
    assert ("`async-grpo run`, `eval` and `doctor` fetch models of the hub" in str(refused.value)) == has_hint


WRONG_DTYPES = {
    "fp16": {"dtype": "fp16"},
    "a name with torch": {"dtype": "torch.float16"},
    "auto": {"torch_dtype": "auto"},
    "a number": {"dtype": 16},
    "a function of torch": {"dtype": "zeros"},
    "whole numbers": {"dtype": "int8"},
    "codes of 8 bits": {"torch_dtype": "float8_e4m3fn"},
    "complex numbers": {"dtype": "complex64"},
    "within the text model": {"text_config": {"dtype": "fp16"}},
}
RIGHT_DTYPES = [
    {"dtype": "half"},
    {"torch_dtype": "bfloat16", "dtype": ...},
    {"dtype": None},
    {"dtype": "float64"},
]


@pytest.mark.parametrize("kind", WRONG_DTYPES)
def test_a_name_that_is_no_dtype_is_refused_in_words(folder, kind):
    edited("config.json", **WRONG_DTYPES[kind])(folder)
    with pytest.raises(
        ConfigurationError, match="is no dtype of torch for weights: write float32, bfloat16 or float16"
    ):
        check(folder)


@pytest.mark.parametrize("values", RIGHT_DTYPES, ids=str)
def test_the_name_of_a_dtype_is_read(folder, values):
    edited("config.json", **values)(folder)
    check(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_byte_order_mark_in_a_model_s_file_is_named(folder, name):
    (folder / name).write_text("\ufeff" + (folder / name).read_text())
    with pytest.raises(
        ConfigurationError, match=f"{name} cannot be used: .*byte order mark .BOM.*without one"
    ):
        check(folder)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"hidden_act": "siluu"},
            r"config.json has the value 'siluu' .hidden_act., which transformers does not know",
        ),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and at least 1 and at most 16384 is read"),
        (
            {"intermediate_size": 99},
            r"layers.0.mlp.gate_proj.weight has the shape .384, 128. in the files, but .99, 128. by config.json",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_the_weights_is_refused_in_words(folder, values, words):
    edited("config.json", **values)(folder)
    with pytest.raises(ConfigurationError, match=words):
        load_causal_lm(folder, "float32")
