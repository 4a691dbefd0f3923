"""A model's folder of somebody else's runs no code, hands no other weights to the trainer, and ends in a sentence."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_folders import Canary, bounded, command, link_to, replaced
from safetensors.torch import load_file, save_file

from async_grpo.data import COUNTDOWN_HELDOUT, TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.modeling.load import load_causal_lm, load_config, load_tokenizer, stop_token_ids
from async_grpo.training.sharding import weight_names

pytestmark = pytest.mark.timeout(180)
NORM = "model.norm.weight"


class Model:
    """A copy of the tiny model, to be changed, and what it would run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary = folder / "model", Canary(folder / "it-ran")
        shutil.copytree(TINY_MODEL, self.folder)

    def say(self, name: str = "config.json", **changes: Any) -> None:
        path = self.folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def with_code(self, name: str, key: str, **changes: Any) -> None:
        """Name a class of a file in the folder, as models with code of their own do."""
        self.canary.source(self.folder, "evil.py")
        self.say(name, auto_map={key: "evil.Evil"}, **changes)

    def pickled(self, name: str) -> None:
        (self.folder / name).write_bytes(self.canary.pickled)

    def index(self, file: str) -> None:
        """Name a file for the norm's weight, in the index of several files."""
        names = dict.fromkeys(load_file(self.folder / "model.safetensors"), "model.safetensors")
        content = {"weight_map": names | {NORM: file}}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(content))

    def zeros(self, file: str) -> None:
        weights = load_file(self.folder / "model.safetensors")
        save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, self.folder / file)

    def without(self, name: str) -> None:
        weights = load_file(self.folder / "model.safetensors")
        del weights[name]
        save_file(weights, self.folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def model(tmp_path) -> Model:
    return Model(tmp_path)


def started(model: Model, capfd, tmp_path) -> Any:
    """All that `run` looks at before it starts anything."""
    data = tmp_path / "data.jsonl"
    rows = [json.loads(line) for line in COUNTDOWN_HELDOUT.read_text().splitlines()[:2]]
    texts = [{k: v for k, v in row.items() if k != "input_token_ids"} for row in rows]
    for row in texts:
        row["messages"] = [{"role": "user", "content": "What is 1 + 1?"}]
    data.write_text("".join(json.dumps(row) + "\n" for row in texts))
    options = ["--samples-per-question", "2", "--batch-size", "2", "--max-generation-tokens", "16"]
    folders = ["--model-name-or-path", model.folder, "--data-path", data, "--output-dir", tmp_path / "out"]
    return command(capfd, "run", *folders, "--reward-fns", "format", "--dry-run", *options)


REFUSED: dict[str, tuple[Callable[[Model], Any], str]] = {
    "code of its own": (
        lambda m: m.with_code("config.json", "AutoModelForCausalLM", model_type="evil"),
        "does not know its model_type 'evil'",
    ),
    "code without a kind": (
        lambda m: m.with_code("config.json", "AutoModelForCausalLM", model_type=None),
        "auto_map",
    ),
    "code for its configuration": (
        lambda m: m.with_code("config.json", "AutoConfig", model_type="evil"),
        "auto_map",
    ),
    "code of a hub's repository": (
        lambda m: m.say(auto_map={"AutoConfig": "evil/repo--evil.Evil"}, model_type="evil"),
        "auto_map",
    ),
    "code of a part of the model": (
        lambda m: m.say(text_config={"auto_map": {"AutoConfig": "evil.Evil"}}),
        "auto_map",
    ),
    "code for its tokenizer": (
        lambda m: m.with_code("tokenizer_config.json", "AutoTokenizer", tokenizer_class="Evil"),
        "does not know its tokenizer_class 'Evil'",
    ),
    "code for its tokenizer, which is called as a function of transformers": (
        lambda m: m.with_code("tokenizer_config.json", "AutoTokenizer", tokenizer_class="pipeline"),
        "does not know its tokenizer_class 'pipeline'",
    ),
    "a link to nothing for the tokenizer": (
        lambda m: replaced(m.folder / "tokenizer.json", link_to("/nowhere/blob")),
        "is a link to a file that is not there",
    ),
    "a link to nothing for the weights": (
        lambda m: replaced(m.folder / "model.safetensors", link_to("/nowhere/blob")),
        "is a link to a file that is not there",
    ),
    "a kernel of the hub": (lambda m: m.say(attn_implementation="evil/kernel"), "attn_implementation"),
    "an adapter of another model": (
        lambda m: (m.folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/model"}'),
        "adapter",
    ),
    "another model to verify": (
        lambda m: m.say(speculators_config={"verifier": {"name_or_path": "evil/model"}}),
        "speculators_config",
    ),
    "pickles for weights": (
        lambda m: (m.pickled("pytorch_model.bin"), (m.folder / "model.safetensors").unlink()),
        "are pickles",
    ),
    "weights of nothing but bytes": (
        lambda m: (m.folder / "model.safetensors").write_bytes(b"\xff" * 999),
        "cannot be read",
    ),
    "weights cut short": (
        lambda m: (m.folder / "model.safetensors").write_bytes(
            (m.folder / "model.safetensors").read_bytes()[:-8]
        ),
        "cannot be read",
    ),
    "the same weights twice": (lambda m: m.zeros("a.safetensors"), "is in two files"),
    "an index that leads above": (lambda m: m.index("../../evil.safetensors"), "leads out of its folder"),
    "an index that leads elsewhere": (lambda m: m.index("/etc/hostname"), "leads out of its folder"),
    "an index of a file that is not there": (lambda m: m.index("b.safetensors"), "cannot be read"),
    "a billion layers": (lambda m: m.say(num_hidden_layers=10**9), "num_hidden_layers is 1000000000"),
    "a configuration of brackets": (
        lambda m: (m.folder / "config.json").write_text("[" * 10**6),
        "nested deeper",
    ),
    "a configuration that is a list": (
        lambda m: (m.folder / "config.json").write_text("[1]"),
        "does not contain a JSON object",
    ),
    "a configuration of 40 MB": (
        lambda m: (m.folder / "config.json").write_text(" " * (40 << 20)),
        "larger than 16 MB",
    ),
    "a configuration of other kinds": (lambda m: m.say(hidden_size="big", rope_theta=[]), "cannot be"),
    "a pipe for the tokenizer": (
        lambda m: replaced(m.folder / "tokenizer.json", os.mkfifo),
        "neither a file nor a folder",
    ),
    "a device for the weights": (
        lambda m: replaced(m.folder / "model.safetensors", link_to("/dev/zero")),
        "neither a file nor a folder",
    ),
    "a tokenizer of brackets": (
        lambda m: (m.folder / "tokenizer.json").write_text("[" * 10**6),
        "tokenizer",
    ),
    "a template without end": (
        lambda m: (m.folder / "chat_template.jinja").write_text(
            "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
        ),
        "chat template takes more than",
    ),
    "a template that reaches for Python": (
        lambda m: (m.folder / "chat_template.jinja").write_text(
            "{{ messages.__class__.__mro__[1].__subclasses__() }}"
        ),
        "chat template refuses these messages: access to attribute '__class__'",
    ),
    "an end token that is text": (
        lambda m: m.say("generation_config.json", eos_token_id="ls"),
        "is no token id",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hostile_model_is_refused_by_name_before_anything_starts(model, tmp_path, capfd, monkeypatch, kind):
    if kind == "a template without end":
        monkeypatch.setattr("async_grpo.experience.prompts.TEMPLATE_S", 0.5)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    change, message = REFUSED[kind]
    change(model)
    ended = started(model, capfd, tmp_path)
    assert ended.is_named_error and message in ended.err, ended.text
    assert not model.canary.path.exists()


def test_the_model_itself_would_start(model, tmp_path, capfd):
    ended = started(model, capfd, tmp_path)
    assert ended.code == 0, ended.text


HARMLESS: dict[str, Callable[[Model], Any]] = {
    "code for a configuration that transformers knows": lambda m: m.with_code("config.json", "AutoConfig"),
    "code for a model that transformers knows": lambda m: m.with_code("config.json", "AutoModelForCausalLM"),
    "code of the hub for a model that transformers knows": lambda m: m.say(
        auto_map={"AutoConfig": "evil/repo--evil.Evil", "AutoModelForCausalLM": "evil/repo--evil.Evil"}
    ),
    "code for a tokenizer that transformers knows": lambda m: m.with_code(
        "tokenizer_config.json", "AutoTokenizer"
    ),
    "code for a tokenizer, as a pair": lambda m: (
        m.canary.source(m.folder, "evil.py"),
        m.say("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
    ),
    "links to nothing of a download of some files": lambda m: (
        (m.folder / "LICENSE").symlink_to("../blobs/none"),
        (m.folder / "onnx").symlink_to("../blobs/none"),
    ),
    "a pickle beside the weights": lambda m: m.pickled("pytorch_model.bin"),
    "a pickle that torch's own reader would load": lambda m: m.pickled(".metadata"),
    "code that nothing names": lambda m: m.canary.source(m.folder, "modeling.py"),
    "a package in the place of transformers": lambda m: m.canary.source(m.folder, "transformers.py"),
    "a manifest of a run": lambda m: (m.folder / "manifest.json").write_text("{}"),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_lies_beside_a_model_changes_nothing(model, kind, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    monkeypatch.chdir(model.folder)
    HARMLESS[kind](model)
    with bounded():
        loaded = load_causal_lm(model.folder, "float32").state_dict()
        assert load_config(model.folder).model_type and load_tokenizer(model.folder) is not None
        assert type(load_config(model.folder)) is type(load_config(TINY_MODEL))
        tokenizer = load_tokenizer(model.folder)
    text = "3 + 4 = <|im_end|>"
    assert type(tokenizer).__module__.startswith("transformers.")
    assert tokenizer(text).input_ids == load_tokenizer(TINY_MODEL)(text).input_ids
    expected = load_causal_lm(TINY_MODEL, "float32").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert stop_token_ids(model.folder) == stop_token_ids(TINY_MODEL)
    assert set(weight_names(model.folder)) == set(weight_names(TINY_MODEL))
    assert not model.canary.path.exists()


def test_weights_that_are_not_there_are_not_made_up(model):
    model.without(NORM)
    with pytest.raises(ConfigurationError, match=f"lack 1 of the model's, such as {NORM}"):
        load_causal_lm(model.folder, "float32")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_model_that_is_far_larger_than_its_weights_takes_no_memory(model, deterministic):
    """Its embedding alone would take 4 GB, which PyTorch fills where its algorithms are deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    model.say(vocab_size=1 << 24)
    try:
        with bounded(), pytest.raises(ConfigurationError, match="they do not belong together"):
            load_causal_lm(model.folder, "float32")
    finally:
        torch.use_deterministic_algorithms(before)


def test_files_of_a_download_may_be_links(model, tmp_path):
    """So the cache of the hub keeps them."""
    (model.folder / "model.safetensors").rename(tmp_path / "blob")
    (model.folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert load_causal_lm(model.folder, "float32").state_dict()[NORM].numel()
