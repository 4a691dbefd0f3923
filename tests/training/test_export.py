"""A checkpoint is a whole Hugging Face folder or it is not there; a single process suffices to see it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import critic_policy, save_tiny_model, tiny_model
from transformers import AutoModelForCausalLM

from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import load_causal_lm, model_fingerprint, stop_token_ids
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.export import VALUE_HEAD_FILE, ModelExporter, load_value_head
from async_grpo.training.sharding import shard_policy

IDS = torch.arange(1, 30)[None]


@pytest.fixture
def source(tmp_path):
    """A model folder with everything that has to come along."""
    folder = save_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9], "temperature": 0.6}))
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": []}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a"})
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def writer(tmp_path, source, ranks, **options):
    return ModelExporter(tmp_path / "out", source, ranks, **({"dtype": "float32"} | options))


@pytest.mark.parametrize("tied", [True, False])
def test_a_reloaded_checkpoint_gives_the_same_logits(tmp_path, source, ranks, tied):
    model = tiny_model(seed=4, tie_word_embeddings=tied)
    with torch.no_grad():
        expected = model(IDS).logits
    folder = writer(tmp_path, source, ranks).save(shard_policy(PolicyModel(model), ranks), 1234)
    assert folder == tmp_path / "out" / "hf_format" / "samples_1234"
    with torch.no_grad():
        got = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
    assert torch.equal(got, expected)


def test_the_saved_dtype_is_the_asked_one_and_the_live_weights_stay_float32(tmp_path, source, ranks):
    policy = shard_policy(PolicyModel(load_causal_lm(source, "float32")), ranks)
    folder = writer(tmp_path, source, ranks, dtype="bfloat16").save(policy, 1)
    assert not load_value_head(PolicyModel(tiny_model(), value_head=True), folder)  # there is none
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors  # tied
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def test_tokenizer_template_and_generation_settings_come_along_and_whoever_may_read_them_may_read_all(
    tmp_path, source, ranks
):
    policy = shard_policy(PolicyModel(tiny_model(), value_head=True), ranks)
    folder = writer(tmp_path, source, ranks).save(policy, 1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert model_fingerprint(folder) == model_fingerprint(source)
    assert stop_token_ids(folder) == (0, 3, 9)
    modes = {path.stat().st_mode for path in folder.rglob("*") if path.is_file()}
    assert modes == {(folder / "config.json").stat().st_mode}


def test_a_critic_comes_back_exactly_and_the_folder_remains_a_plain_model(tmp_path, source, ranks):
    expected = dict(critic_policy().value_head.state_dict())
    saving = writer(tmp_path, source, ranks, dtype="bfloat16")
    folder = saving.save(shard_policy(critic_policy(), ranks), 1)
    assert {tensor.dtype for tensor in load_file(folder / VALUE_HEAD_FILE).values()} == {torch.float32}
    fresh = PolicyModel(load_causal_lm(folder, "float32"), value_head=True)
    assert load_value_head(fresh, folder)
    for name, tensor in fresh.value_head.state_dict().items():
        assert torch.equal(tensor, expected[name])
    assert not load_value_head(PolicyModel(tiny_model()), folder)  # a policy without one takes none
    # what an engine finds: vLLM takes every *.safetensors of the folder itself for the model's
    assert [path.name for path in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert load_file(folder / "model.safetensors").keys() == dict(tiny_model().named_parameters()).keys()
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"weight": torch.ones(1, 32), "bias": torch.ones(1)}, r"\[1, 32\].*\[1, 64\]"),
        ({"weight": torch.ones(1, 64)}, "bias"),
        (None, "cannot be read"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused(tmp_path, content, complaint):
    path = tmp_path / VALUE_HEAD_FILE
    path.parent.mkdir()
    if content is None:
        path.write_bytes(b"cut short")
    else:
        save_file(content, path)
    policy = PolicyModel(tiny_model(), value_head=True)
    with pytest.raises(ConfigurationError, match=complaint):
        load_value_head(policy, tmp_path)


@pytest.mark.parametrize("broken", ["shutil.copyfile", "save_file"])
def test_a_checkpoint_that_was_cut_short_is_not_there(tmp_path, source, ranks, monkeypatch, broken):
    policy, saving = shard_policy(critic_policy(), ranks), writer(tmp_path, source, ranks)

    def disk_full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"async_grpo.training.export.{broken}", disk_full)
        with pytest.raises(OSError, match="no space"):
            saving.save(policy, 10)
    assert not list((tmp_path / "out" / "hf_format").glob("samples_*"))
    saving.save(policy, 20)
    assert [path.name for path in (tmp_path / "out" / "hf_format").iterdir()] == ["samples_20"]


def test_only_the_newest_are_kept_and_foreign_folders_are_left_alone(tmp_path, source, ranks):
    policy = shard_policy(PolicyModel(tiny_model()), ranks)
    saving = writer(tmp_path, source, ranks, keep_last=2)
    folder = tmp_path / "out" / "hf_format"
    (folder / "samples_best").mkdir(parents=True)
    for samples in (8, 90, 100):  # by number: as text, 100 < 8
        saving.save(policy, samples)
    assert sorted(path.name for path in folder.iterdir()) == ["samples_100", "samples_90", "samples_best"]


def test_an_earlier_runs_checkpoint_of_the_same_count_is_replaced(tmp_path, source, ranks):
    for seed in (1, 2):
        model = tiny_model(seed=seed)
        folder = writer(tmp_path, source, ranks).save(shard_policy(PolicyModel(model), ranks), 5)
    assert torch.equal(
        load_file(folder / "model.safetensors")["model.norm.weight"], tiny_model(seed=2).model.norm.weight
    )
    assert [path.name for path in folder.parent.iterdir()] == ["samples_5"]


def test_a_checkpoint_is_due_every_so_many_samples_and_the_final_one_is_not_written_twice(
    tmp_path, source, ranks
):
    policy = shard_policy(PolicyModel(tiny_model()), ranks)
    saving = writer(tmp_path, source, ranks, min_samples_between=100)
    folder = tmp_path / "out" / "hf_format"
    for samples in (60, 120, 180, 240):
        saving.save_if_due(policy, samples)
    written = (folder / "samples_240").stat().st_mtime_ns
    saving.save_final(policy, 240)
    assert (folder / "samples_240").stat().st_mtime_ns == written
    saving.save_final(policy, 250)
    assert sorted(path.name for path in folder.iterdir()) == ["samples_120", "samples_240", "samples_250"]
