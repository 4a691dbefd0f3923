"""Folders of diffusers: what can be trained is read, everything else is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_flow import NEEDS_DIFFUSERS, NUM_LABELS, SHAPE, save_tiny_flow_model

from async_grpo.config.flow_prompts import LabelPrompts
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.flow.folder import read_flow_folder

pytestmark = NEEDS_DIFFUSERS

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_flow_model(tmp_path_factory.mktemp("flow"))


@pytest.fixture
def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def change(path, **values):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | values))


def test_the_times_fall_evenly_from_one_to_zero(model):
    folder = read_flow_folder(model)
    schedule = folder.schedule(4)
    assert schedule.sigmas == pytest.approx((1, 0.75, 0.5, 0.25, 0))
    assert schedule.timesteps == pytest.approx((1000, 750, 500, 250))
    assert schedule.t_max == pytest.approx(0.75)
    times = schedule.times(torch.tensor([0, 3]))
    assert times.begin.tolist() == pytest.approx([1, 0.25]) and times.end.tolist() == pytest.approx([0.75, 0])
    assert folder.latent_shape == SHAPE and folder.num_labels == NUM_LABELS


def test_a_scheduler_that_shifts_its_times_is_used_as_diffusers_does(copied):
    change(copied / "scheduler/scheduler_config.json", shift=3.0)
    expected = [3 * s / (1 + 2 * s) for s in (1, 0.75, 0.5, 0.25)]
    assert read_flow_folder(copied).schedule(4).sigmas[:-1] == pytest.approx(expected)
    assert read_flow_folder(copied).fingerprint


@pytest.mark.parametrize("num_steps", [0, 1001])
def test_too_many_or_no_denoising_steps_are_refused(model, num_steps):
    with pytest.raises(ConfigurationError, match=f"not {num_steps}: set --max-generation-tokens"):
        read_flow_folder(model).schedule(num_steps)


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("model_index.json", {"_class_name": "SanaPipeline"}, "holds a SanaPipeline; only these"),
        (
            "model_index.json",
            {"vae": ["diffusers", "AutoencoderKL"]},
            "but a DiTPipeline has no such part",
        ),
        (
            "model_index.json",
            {"scheduler": ["diffusers", "DDIMScheduler"]},
            "but a DiTPipeline has FlowMatchEulerDiscreteScheduler",
        ),
        (
            "model_index.json",
            {"transformer": ["evil", "Other"]},
            "but a DiTPipeline has DiTTransformer2DModel",
        ),
        ("model_index.json", {"id2label": {"7": "h"}}, "label 7 is outside the model's 5 labels"),
        ("model_index.json", {"id2label": {"x": "h"}}, "id2label must map numbers"),
        ("transformer/config.json", {"out_channels": 2}, "out_channels is 2, but the velocity has 1"),
        ("transformer/config.json", {"in_channels": 4}, "pictures have 1 channel"),
        ("transformer/config.json", {"in_channels": True}, "in_channels is True"),
        ("transformer/config.json", {"dropout": 0.1}, "dropout must be 0"),
        ("transformer/config.json", {"sample_size": 5}, "sample_size 5 is no multiple of patch_size 2"),
        ("transformer/config.json", {"sample_size": 10**6}, "sample_size is 1000000, more than 1024 pixels"),
        ("transformer/config.json", {"num_layers": 10**7}, "10000000 blocks, more than 1000"),
        ("transformer/config.json", {"num_layers": 0}, "num_layers is 0, not a whole number above 0"),
        ("transformer/config.json", {"num_attention_heads": None}, "num_attention_heads is None"),
        ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**12}, "is 1000000000000, not a whole"),
        ("model_index.json", {"vae": 5}, "says vae 5, but"),
        ("model_index.json", {"id2label": {"0": "a", "1": "a "}}, "has the name 'a' twice"),
        ("model_index.json", {"id2label": {"1": "a", "01": "b"}}, "has a number twice"),
        ("model_index.json", {"id2label": {"1" * 5000: "a"}}, "id2label must map numbers"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_by_name(copied, file, values, message):
    change(copied / file, **values)
    with pytest.raises(ConfigurationError, match=message):
        read_flow_folder(copied)


def test_a_folder_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"no folder of diffusers \(it has no model_index.json\)"):
        read_flow_folder(tmp_path)
    (tmp_path / "model_index.json").write_text("[1]")
    with pytest.raises(ConfigurationError, match="holds no JSON object"):
        read_flow_folder(tmp_path)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(copied):
    change(copied / "transformer/config.json", num_layers=3)
    with pytest.raises(ConfigurationError, match="has the shape None in the files"):
        read_flow_folder(copied).load_model()
    change(copied / "transformer/config.json", num_layers=900)
    with pytest.raises(ConfigurationError, match="describes .* parameters"):
        read_flow_folder(copied).load_model()
    (copied / WEIGHTS).rename(copied / "transformer/diffusion_pytorch_model.bin")
    change(copied / "transformer/config.json", num_layers=2)
    with pytest.raises(ConfigurationError, match="holds no weights in safetensors"):
        read_flow_folder(copied).load_model()


def test_weights_that_the_configuration_does_not_describe_are_refused(copied):
    # Without the check, diffusers would drop the last block with a warning
    change(copied / "transformer/config.json", num_layers=1)
    message = r"weights that config.json does not describe, such as \['transformer_blocks.1"
    with pytest.raises(ConfigurationError, match=message):
        read_flow_folder(copied).check_weights()


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("transformer/config.json", {"activation_fn": "unknown"}),
        ("transformer/config.json", {"norm_type": "layer_norm"}),
        ("scheduler/scheduler_config.json", {"use_dynamic_shifting": True}),
        ("scheduler/scheduler_config.json", {"invert_sigmas": True}),
    ],
)
def test_what_diffusers_cannot_make_is_refused_with_the_folder(copied, file, values):
    change(copied / file, **values)
    with pytest.raises(ConfigurationError, match=str(copied)):
        folder = read_flow_folder(copied)
        folder.schedule(4)
        folder.check_weights()


def test_spaces_around_the_name_of_a_label_do_not_matter(copied):
    change(copied / "model_index.json", id2label={"0": " a ", "1": "b"})
    assert LabelPrompts(read_flow_folder(copied)).prompt_tokens({"input": "a"}, 1) == [0]


def test_the_loaded_weights_are_those_of_the_file(copied):
    tensors = load_file(copied / WEIGHTS)
    tensors["proj_out_2.bias"] = torch.arange(len(tensors["proj_out_2.bias"]), dtype=torch.float32)
    save_file(tensors, copied / WEIGHTS)
    model = read_flow_folder(copied).load_model()
    assert torch.equal(model.proj_out_2.bias, tensors["proj_out_2.bias"])


def test_another_description_gives_another_fingerprint_and_other_weights_do_not(model, copied):
    fingerprint = read_flow_folder(model).fingerprint
    tensors = load_file(copied / WEIGHTS)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, copied / WEIGHTS)
    assert read_flow_folder(copied).fingerprint == fingerprint
    change(copied / "transformer/config.json", norm_eps=1e-3)
    assert read_flow_folder(copied).fingerprint != fingerprint


def test_a_row_names_the_label_to_draw(model):
    prompts = LabelPrompts(read_flow_folder(model))
    assert prompts.prompt_tokens({"input": "c"}, 1) == [2]
    assert prompts.prompt_tokens({"prompt": " b "}, 1) == [1]
    assert prompts.prompt_tokens({"input_token_ids": [4]}, 1) == [4]
    assert prompts.decode([2]) == "c" and len(prompts) == NUM_LABELS


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "z"}, "must be the name of a label, not 'z'; labels: a, b, c, d, e"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "with --prompt-column, set --prompt-as text"),
        ({"input_token_ids": [1, 2]}, "a list of one number"),
        ({"input_token_ids": [5]}, "label 5 is outside the model's 5 labels"),
        ({"input": "a", "picture": "reference.png"}, "the column 'picture' is where rewards get the picture"),
        (
            {"input": "a", "drawn_pictures": []},
            "the column 'drawn_pictures' is where rewards get the picture",
        ),
    ],
)
def test_a_row_without_a_label_of_the_model_is_refused(model, row, message):
    with pytest.raises(ConfigurationError, match=message):
        LabelPrompts(read_flow_folder(model)).prompt_tokens(row, 1)


def test_labels_without_names_are_numbers(copied):
    index = json.loads((copied / "model_index.json").read_text())
    del index["id2label"]
    (copied / "model_index.json").write_text(json.dumps(index))
    assert LabelPrompts(read_flow_folder(copied)).prompt_tokens({"input": "3"}, 1) == [3]
