"""Adapters that are compared on one engine compute in their common form what peft computes with each alone."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_policy import SETTINGS, save_tiny_model
from transformers import AutoModelForCausalLM

from async_grpo.cluster.compared_adapters import AdapterSender
from async_grpo.config.compared_adapters import BASE, ComparedAdapters, adapter_folders
from async_grpo.errors import ConfigurationError, WeightsDidNotLand
from async_grpo.weights.package import unpack

# Rank, alpha and layers of each adapter
ADAPTERS = {
    "small": (2, 8, ["q_proj", "v_proj"]),
    "large": (5, 3, ["q_proj", "down_proj"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, and beside it a folder with the adapters."""
    folder = tmp_path_factory.mktemp("compared")
    save_tiny_model(folder / "model")
    for name, (rank, alpha, targets) in ADAPTERS.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, config)
        for parameter_name, matrix in adapted.named_parameters():
            if "lora_" in parameter_name:
                torch.nn.init.normal_(matrix, std=0.3)
        adapted.save_pretrained(folder / "adapters" / name)
    return folder


def compared(folder: Path, **changes: Path) -> ComparedAdapters:
    folders = {name: folder / "adapters" / name for name in ADAPTERS}
    return ComparedAdapters.read(folders | changes, str(folder / "model"))


def test_each_adapter_computes_in_the_common_form_what_peft_computes_with_it(folder):
    adapters = compared(folder)
    settings = adapters.settings
    assert (settings.rank, settings.scaling, settings.sync) == (5, 1.0, "adapter")
    assert {layer.rpartition(".")[2] for layer in settings.layers} == {"q_proj", "v_proj", "down_proj"}
    assert adapters.names == [BASE, "small", "large"]
    for name in adapters.names:
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        weights = dict(model.named_parameters())
        expected = {weight_name: weight.clone() for weight_name, weight in weights.items()}
        if name != BASE:
            adapted = PeftModel.from_pretrained(model, folder / "adapters" / name)
            expected = dict(adapted.merge_and_unload().named_parameters())
            weights = dict(
                AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).named_parameters()
            )
        tensors = adapters.tensors(name)
        for layer in settings.layers:
            a, b = (tensors[f"base_model.model.{layer}.lora_{matrix}.weight"] for matrix in "AB")
            assert len(a) == b.shape[1] == 5
            merged = weights[f"{layer}.weight"] + b @ a
            torch.testing.assert_close(merged, expected[f"{layer}.weight"], rtol=0, atol=1e-5)


def test_adapters_are_named_by_the_option_or_by_their_folders_in_numeric_order(folder, tmp_path):
    small = folder / "adapters" / "small"
    assert adapter_folders(f"b={small},a={small}") == {"b": small, "a": small}
    assert adapter_folders(json.dumps({"a": str(small)})) == {"a": small}
    assert adapter_folders(str(small)) == {"small": small}
    for number in (1920, 960, 10_000):
        (tmp_path / f"samples_{number}").symlink_to(small)
    (tmp_path / "no_adapter").mkdir()
    assert list(adapter_folders(str(tmp_path))) == ["samples_960", "samples_1920", "samples_10000"]
    for name in ("b2_10", "b2_9", "b10_1", "a3_50"):
        (tmp_path / "several" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "several" / name).symlink_to(small)
    assert list(adapter_folders(str(tmp_path / "several"))) == ["a3_50", "b2_9", "b2_10", "b10_1"]


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("base={small}", "'base' is the name of the base"),
        ("a={small},a={small}", "two adapters have the same name"),
        ("a/b={small}", "'a/b' is no name for an adapter"),
        ("={small}", "'' is no name for an adapter"),
        ("a={missing}", "there is no adapter_config.json"),
        ("{missing}", "neither this folder nor one inside it holds an adapter"),
    ],
)
def test_names_and_folders_that_cannot_be_used_are_refused(folder, option, problem):
    text = option.format(small=folder / "adapters" / "small", missing=folder / "model")
    with pytest.raises(ConfigurationError, match=problem):
        adapter_folders(text)


def test_an_adapter_of_another_model_is_refused_by_its_folder(folder, tmp_path):
    save_tiny_model(tmp_path / "wider", hidden_size=128)
    with pytest.raises(
        ConfigurationError, match=r"adapters/small does not fit the model: it has .* of the shape"
    ):
        ComparedAdapters.read({"small": folder / "adapters" / "small"}, str(tmp_path / "wider"))


# -- sending


class Workers:
    """`Engines` of workers that record what they receive, and compute log-probs from the sum of the B matrices."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.late: set[str] = set()
        self.not_in_use: set[str] = set()  # workers that receive the adapter and do not use it
        self.fenced: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}

    def put(self, chunk):
        return chunk

    def deliver(self, package):
        receipts = {}
        for name in self.late if package.for_late else self.names - self.late:
            self.tensors[name], manifest = unpack(package.chunks)
            if name in self.not_in_use:
                manifest = {
                    key: type(value)(**(vars(value) | {"in_use": False})) for key, value in manifest.items()
                }
            total = sum(float(tensor.sum()) for key, tensor in self.tensors[name].items() if "lora_B" in key)
            receipts[name] = manifest, np.full(sum(map(len, package.canary_texts)), total, np.float32)
        return receipts

    def commit(self, package, landed):
        for name in landed:
            self.versions[name] = package.version
            self.late.discard(name)

    def fence(self, worker_id, error):
        self.fenced[worker_id] = str(error)
        self.names.discard(worker_id)
        self.late.discard(worker_id)


def test_every_worker_gets_each_adapter_and_one_that_does_not_use_it_is_fenced(folder):
    workers = Workers("w0", "w1")
    adapters = compared(folder)
    sender = AdapterSender(workers, adapters, SETTINGS)
    sender.send(0, BASE)
    sender.send(1, "small")
    assert workers.versions == {"w0": 1, "w1": 1}
    for name, tensor in adapters.tensors("small").items():
        assert torch.equal(workers.tensors["w0"][name], tensor)
    workers.not_in_use = {"w1"}
    sender.send(2, "large")
    assert workers.versions["w0"] == 2 and "received, yet not in use" in workers.fenced["w1"]
    workers.not_in_use = {"w0"}
    with pytest.raises(WeightsDidNotLand, match="no engine computes with the adapter small"):
        sender.send(3, "small")


def test_a_worker_that_joins_late_gets_the_current_adapter_alone(folder):
    workers = Workers("w0")
    sender = AdapterSender(workers, compared(folder), SETTINGS)
    sender.send(0, BASE)
    sender.send(1, "small")
    workers.names.add("w1")
    workers.late = {"w1"}
    assert sender.serve_late() == ["w1"]
    assert workers.versions == {"w0": 1, "w1": 1} and not workers.late


def test_an_adapter_that_changes_nothing_is_named(folder, tmp_path, caplog):
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    fresh = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    fresh.save_pretrained(tmp_path / "fresh")  # peft's B is zero at first
    sender = AdapterSender(Workers("w0"), compared(folder, fresh=tmp_path / "fresh"), SETTINGS)
    with caplog.at_level(logging.WARNING):
        for version, name in enumerate((BASE, "small", "fresh")):
            sender.send(version, name)
    messages = [record.getMessage() for record in caplog.records if "changes nothing" in record.getMessage()]
    assert len(messages) == 1 and "the adapter fresh as with the base alone" in messages[0]
