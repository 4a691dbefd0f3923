"""A checkpoint of somebody else's runs no code, asks no address, and decides no weights but by files that are its own."""

import dataclasses
import json
import os
import shutil
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from early_starts import nothing_early
from hostile_folders import Canary, Ended, command, link_to, relisted, replaced, resealed
from safetensors.torch import load_file, save_file

from async_grpo.config.resume import as_options, find_checkpoint
from async_grpo.config.run import RunConfig
from async_grpo.data import COUNTDOWN_HELDOUT, COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.errors import CheckpointBroken, ConfigurationError
from async_grpo.experience.dataset import PromptCursor, Question
from async_grpo.experience.state import ExperienceState
from async_grpo.launch import evaluate
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.checkpoint import Checkpointer
from async_grpo.training.checkpoint_folder import checkpoints_of, verify_checkpoint
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import distributed_run
from async_grpo.training.optimizer import build_policy_optimizer

pytestmark = pytest.mark.timeout(180)
NORM = "model.norm.weight"
GROUP = {"number": 0, "ordinal": 0, "question": 0, "resampled": 0, "samples": None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run's folder with the checkpoint of step 7, whose last norm is 0.5 everywhere."""
    folder = tmp_path_factory.mktemp("saved")
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(COUNTDOWN_HELDOUT.read_text().splitlines(keepends=True)[:4]))
    options = {
        "model_name_or_path": str(TINY_MODEL),
        "data_path": str(COUNTDOWN_TRAIN),
        "eval_data_path": f"held={held_out}",
        "reward_fns": "countdown,format",
        "temperature": 0.75,
        "max_generation_tokens": 24,
    }
    with distributed_run("cpu", timeout_s=60) as ranks:
        policy = PolicyModel(load_causal_lm(TINY_MODEL, "float32"))
        with torch.no_grad():
            dict(policy.named_parameters())[f"model.{NORM}"].fill_(0.5)
        _, scheduler = build_policy_optimizer(policy, OptimizerConfig(), 10)
        checkpointer = Checkpointer(
            folder / "run",
            ranks,
            policy,
            scheduler,
            keep=2,
            timeout_s=60.0,
            inputs={},
            options=as_options(RunConfig(**options)),
        )
        checkpointer.save(7, 56)
        assert checkpointer.wait()
    return folder / "run"


@dataclasses.dataclass
class Hostile:
    """A copy of the run, to be changed, and what it would run."""

    run: Path
    canary: Canary

    @property
    def checkpoint(self) -> Path:
        return checkpoints_of(self.run)[0]

    @property
    def shard(self) -> Path:
        return next((self.checkpoint / "training").glob("*.safetensors"))

    def options(self, **changes: Any) -> None:
        """Have the manifest say other options of the run."""
        resealed(self.checkpoint, lambda content: content["options"].update(changes))

    def manifest(self, **changes: Any) -> None:
        resealed(self.checkpoint, lambda content: content.update(changes))

    def source(self) -> str:
        return f"{self.canary.source(self.run)}:run"

    def zeros(self, name: str) -> None:
        """Add a shard that says the weights are zeros."""
        weights = {key: torch.zeros_like(value) for key, value in load_file(self.shard).items()}
        save_file(weights, self.checkpoint / "training" / name)


@pytest.fixture
def hostile(saved, tmp_path) -> Hostile:
    shutil.copytree(saved, tmp_path / "run")
    return Hostile(tmp_path / "run", Canary(tmp_path / "it-ran"))


def two_gigabytes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 << 30)


def elsewhere(hostile: Hostile) -> Path:
    moved = hostile.run / "elsewhere.safetensors"
    hostile.shard.rename(moved)
    return moved


def link_the_shard(hostile: Hostile) -> None:
    shard = hostile.shard
    shard.symlink_to(elsewhere(hostile))


def link_the_folder(hostile: Hostile) -> None:
    training = hostile.checkpoint / "training"
    training.rename(hostile.run / "training")
    training.symlink_to(hostile.run / "training")


def a_shard_of(content: bytes) -> Callable[[Hostile], None]:
    def change(hostile: Hostile) -> None:
        hostile.shard.write_bytes(content)
        relisted(hostile.checkpoint)

    return change


def a_shard_with_other_metadata(hostile: Hostile) -> None:
    save_file(load_file(hostile.shard), hostile.shard, {"DCP_SHARDING_INFO": '{"weights": 1}'})
    relisted(hostile.checkpoint)


def a_shard_of_another_dtype(hostile: Hostile) -> None:
    """torch converts it without a word, so that the run goes on with rounded weights."""
    tensors = load_file(hostile.shard)
    name = f"weights.model.{NORM}"
    save_file(tensors | {name: tensors[name].bfloat16()}, hostile.shard)
    relisted(hostile.checkpoint)


def a_shard_of_another_model(hostile: Hostile) -> None:
    save_file({f"weights.model.{NORM}": torch.zeros(3)}, hostile.shard)
    relisted(hostile.checkpoint)


FOLDERS: dict[str, tuple[Callable[[Hostile], Any], str]] = {
    "a shard of zeros is added": (
        lambda h: h.zeros("shard-00009.safetensors"),
        "its manifest.json does not name",
    ),
    "a shard of zeros comes first": (lambda h: h.zeros("0.safetensors"), "its manifest.json does not name"),
    "a shard of zeros is hidden": (lambda h: h.zeros(".x.safetensors"), "its manifest.json does not name"),
    "a pickle that torch's own reader would load": (
        lambda h: (h.checkpoint / "training" / ".metadata").write_bytes(h.canary.pickled),
        "its manifest.json does not name",
    ),
    "a pickle beside the manifest": (
        lambda h: (h.checkpoint / "x.pt").write_bytes(h.canary.pickled),
        "its manifest.json does not name",
    ),
    "a link in the place of a shard": (link_the_shard, "a link, a pipe or a device"),
    "a link in the place of the shards' folder": (link_the_folder, "a link, a pipe or a device"),
    "a pipe that nobody writes": (
        lambda h: os.mkfifo(h.checkpoint / "training" / "x.safetensors"),
        "a link, a pipe or a device",
    ),
    "a device in the place of a shard": (
        lambda h: replaced(h.shard, link_to("/dev/zero")),
        "a link, a pipe or a device",
    ),
    "a shard of another dtype": (
        a_shard_of_another_dtype,
        "has the dtype torch.bfloat16, but the trainer has torch.float32",
    ),
    "a shard of two gigabytes": (lambda h: two_gigabytes(h.shard), "has 2147483648 bytes"),
    "a manifest that names no file": (lambda h: h.manifest(files={}, sizes={}), "names no file"),
    "a manifest that names an absolute file": (
        lambda h: h.manifest(files={"/etc/hostname": "0" * 64}, sizes={}),
        "/etc/hostname cannot be read",
    ),
    "a manifest that names a file above": (
        lambda h: h.manifest(files={"../../evil": "0" * 64}, sizes={}),
        "evil cannot be read",
    ),
    "a manifest of the right names and other digests": (
        lambda h: resealed(h.checkpoint, lambda c: c["files"].update(dict.fromkeys(c["files"], "0" * 64))),
        "its sha256 differs",
    ),
    "a manifest that is a pipe": (
        lambda h: replaced(h.checkpoint / "manifest.json", os.mkfifo),
        "manifest.json cannot be read",
    ),
    "a manifest that is a device": (
        lambda h: replaced(h.checkpoint / "manifest.json", link_to("/dev/zero")),
        "links are not followed",
    ),
    "a manifest of two gigabytes": (
        lambda h: two_gigabytes(h.checkpoint / "manifest.json"),
        "manifest.json cannot be read",
    ),
    "a manifest of brackets": (
        lambda h: (h.checkpoint / "manifest.json").write_text("[" * 100_000),
        "nested deeper than 100",
    ),
    "a manifest with half of a surrogate pair": (
        lambda h: h.options(model_name_or_path="\ud800"),
        "manifest.json cannot be|is not a folder|model path|does not say of which model",
    ),
    "a manifest whose step is text": (lambda h: h.manifest(step="many"), "step is 'many'"),
    "a manifest whose step is beyond all": (lambda h: h.manifest(step=10**400), "manifest.json cannot be"),
    "a manifest whose files are a list": (lambda h: h.manifest(files=[1]), "files is no table"),
    "a manifest without the model": (
        lambda h: resealed(h.checkpoint, lambda c: c["options"].pop("model_name_or_path")),
        "does not say of which model",
    ),
    "shards of bytes": (a_shard_of(b"\xff" * 500), "is not of this model|cannot be read"),
    "shards of nothing": (a_shard_of(b""), "is not of this model|cannot be read"),
    "shards whose places are nonsense": (a_shard_with_other_metadata, "is not of this model|cannot be read"),
    "shards of another model": (a_shard_of_another_model, "is not of this model|cannot be read"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_hostile_checkpoint_is_refused_by_name_before_a_model_is_written(hostile, tmp_path, capfd, kind):
    change, message = FOLDERS[kind]
    checkpoint = hostile.checkpoint
    change(hostile)
    ended = command(capfd, "export", checkpoint, "--output-dir", tmp_path / "model")
    assert ended.is_named_error, ended.text
    found = [word for word in message.split("|") if word in ended.err]
    assert found, ended.err
    assert not (tmp_path / "model").exists() and not hostile.canary.path.exists()


def test_the_checkpoint_itself_is_exported_with_its_own_weights(hostile, tmp_path, capfd):
    ended = command(capfd, "export", hostile.run, "--output-dir", tmp_path / "model", "--dtype", "float32")
    assert ended.code == 0, ended.text
    assert load_file(tmp_path / "model" / "model.safetensors")[NORM].eq(0.5).all()


def test_a_checkpoint_without_sizes_as_an_older_version_wrote_it_is_whole(hostile):
    resealed(hostile.checkpoint, lambda content: content.pop("sizes"))
    assert verify_checkpoint(hostile.checkpoint).step == 7
    hostile.shard.write_bytes(hostile.shard.read_bytes() + b"\0")
    with pytest.raises(CheckpointBroken, match="sha256 differs"):
        verify_checkpoint(hostile.checkpoint)


# What the manifest names


def evaluated(hostile: Hostile, monkeypatch, capfd, *arguments: str | Path) -> tuple[Ended, Any]:
    """Run `async-grpo eval` up to the moment in which it starts Ray; returns the configuration that it would run."""
    runs: list[Any] = []
    monkeypatch.setattr(evaluate, "early_start", nothing_early)
    monkeypatch.setattr(evaluate, "start", lambda run, early, arguments: runs.append(run))
    results = hostile.run.parent / "results"
    ended = command(capfd, "eval", *arguments, "--output-dir", results)
    return ended, runs[0] if runs else None


def test_what_describes_the_run_is_taken_over(hostile, monkeypatch, capfd):
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run)
    assert ended.code == 0, ended.text
    assert (run.reward_fns, run.temperature, run.max_generation_tokens) == ("countdown,format", 0.75, 24)


NAMES: dict[str, tuple[Callable[[Hostile], dict[str, Any]], str]] = {
    "a reward's file": (lambda h: {"reward_fns": [h.source()]}, "reward-fns"),
    "a reward's file among shipped ones": (lambda h: {"reward_fns": ["format", h.source()]}, "reward-fns"),
    "a judge of the user's registry": (lambda h: {"reward_fns": ["llm_judge"]}, "reward-fns"),
    "a registry file": (lambda h: {"reward_registry": str(h.canary.source(h.run))}, "reward-registry"),
    "an engine's file": (lambda h: {"engine": h.source()}, "engine"),
    "arguments of the engine": (lambda h: {"engine_options": "trust_remote_code=true"}, "engine-options"),
    "an agent's command": (lambda h: {"environment": f"agent:touch {h.canary.path}"}, "environment"),
    "an environment's file": (lambda h: {"environment": h.source()}, "environment"),
    "a package as an environment": (lambda h: {"environment": "verifiers:os"}, "environment"),
    "an address of judges": (lambda h: {"judge_urls": "http://127.0.0.1:9"}, "judge-urls"),
    "an address of scorers": (lambda h: {"http_scorer_urls": "http://127.0.0.1:9"}, "http-scorer-urls"),
    "code without a sandbox": (
        lambda h: {"reward_fns": ["code"], "reward_options": "allow_unsandboxed=true"},
        "reward-options",
    ),
    "variables for the rewards": (lambda h: {"reward_env": "HF_TOKEN"}, "reward-env"),
    "a judge's model": (lambda h: {"judge_model": str(TINY_MODEL)}, "judge-model"),
    "who is asked when a reward fails": (
        lambda h: {"reward_fallback": f"format={h.source()}"},
        "reward-fallback",
    ),
    "a number as text": (lambda h: {"eval_samples": "many"}, "eval-samples"),
    "a text as a table": (lambda h: {"reward_fns": {"a": 1}}, "reward-fns"),
    "rewards that are no names": (lambda h: {"reward_fns": [1, None]}, "reward-fns"),
    "half of a surrogate pair": (lambda h: {"reward_column": "\ud800"}, "reward-column"),
    "a number out of its range": (lambda h: {"eval_samples": -1}, "eval-samples"),
    "not a number": (lambda h: {"temperature": float("nan")}, "temperature"),
    "a data file that is a device": (lambda h: {"eval_data_path": "/dev/zero"}, "/dev/zero"),
}


@pytest.mark.parametrize("kind", NAMES)
def test_what_a_manifest_names_is_not_run_and_the_user_is_told_to_give_it(hostile, monkeypatch, capfd, kind):
    change, flag = NAMES[kind]
    hostile.options(**change(hostile))
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run)
    assert ended.is_named_error and flag in ended.err.replace("_", "-"), ended.text
    assert run is None and not hostile.canary.path.exists()


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """A server on the loopback interface; its address, and what it has been sent."""
    received: list[bytes] = []

    class Record(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            received.append(self.request.recv(4096))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Record) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", received
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("flag", ["judge_urls", "http_scorer_urls"])
def test_no_address_of_a_folder_is_asked_and_no_key_leaves(hostile, monkeypatch, capfd, listener, flag):
    address, received = listener
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789")
    reward = {"judge_urls": "llm_judge", "http_scorer_urls": "http_scorer"}[flag]
    hostile.options(**{flag: address, "reward_fns": [reward], "reward_env": "MY_API_KEY"})
    for arguments in (["eval", hostile.run], ["export", hostile.run, "--output-dir", hostile.run / "model"]):
        ended = command(capfd, *arguments)
        assert "sk-0123456789" not in ended.text
        assert ended.is_named_error or arguments[0] == "export"
    assert received == []


def test_the_user_may_give_what_the_run_used(hostile, monkeypatch, capfd):
    """The error says how; then it is the user's own choice, and the file runs."""
    source = hostile.source()
    hostile.options(reward_fns=[source])
    ended, _ = evaluated(hostile, monkeypatch, capfd, hostile.run)
    assert f"used --reward-fns {source}" in ended.err and "give --reward-fns yourself" in ended.err
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run, "--reward-fns", source)
    assert ended.code == 0 and run.reward_fns == source, ended.text


def test_options_for_rewards_reach_no_reward_of_the_users(hostile, monkeypatch, capfd):
    """`reward_options` of a folder could turn the user's own reward to another address."""
    own = hostile.run / "mine.py"
    own.write_text("def mine(sample, url='http://127.0.0.1:1'): return 1.0\n")
    hostile.options(reward_options="url=http://127.0.0.1:9")
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run, "--reward-fns", f"{own}:mine")
    assert ended.is_named_error and "give --reward-options yourself" in ended.err and run is None
    hostile.options(reward_options="weight=0.5")
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run, "--reward-fns", "format")
    assert ended.code == 0 and run.reward_options == "weight=0.5", ended.text


def test_rows_of_a_file_that_a_folder_names_reach_no_judge_of_the_users(hostile, monkeypatch, capfd):
    judge = ["--reward-fns", "http_scorer", "--http-scorer-urls", "http://127.0.0.1:9"]
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run, *judge)
    assert ended.is_named_error and "give --eval-data-path yourself" in ended.err and run is None, ended.text
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run)
    assert ended.code == 0 and f"questions, as the run of {hostile.run} says: held=" in ended.text


def test_a_manifest_beside_a_model_is_not_read(hostile, monkeypatch, capfd):
    hostile.options(reward_fns=[hostile.source()], engine=hostile.source(), temperature=0.5)
    model = hostile.run.parent / "model"
    shutil.copytree(TINY_MODEL, model)
    shutil.copy(hostile.checkpoint / "manifest.json", model)
    data = json.loads((hostile.checkpoint / "manifest.json").read_text())["options"]["eval_data_path"]
    ended, run = evaluated(hostile, monkeypatch, capfd, model, "--reward-fns", "format", "--data", data)
    assert ended.code == 0, ended.text
    assert (run.engine, run.temperature, run.reward_fns) == ("vllm", 1.0, "format")
    assert not hostile.canary.path.exists()


def test_an_estimator_of_the_runs_own_is_not_run_and_an_evaluation_does_without(hostile, monkeypatch, capfd):
    hostile.options(advantage_estimator=hostile.source())
    ended, run = evaluated(hostile, monkeypatch, capfd, hostile.run)
    assert ended.code == 0, ended.text
    assert run.advantage_estimator == "grpo" and not hostile.canary.path.exists()


# Going on from it


def going_on(hostile: Hostile, **changes: Any) -> RunConfig:
    options = json.loads((hostile.checkpoint / "manifest.json").read_text())["options"]
    known = {
        name: options[name]
        for name in ("model_name_or_path", "data_path", "temperature", "max_generation_tokens")
    }
    told = {
        "reward_fns": "countdown,format",
        "resume": str(hostile.checkpoint),
        "output_dir": str(hostile.run / "b"),
    }
    return RunConfig(**known | told | changes)


def test_a_run_that_goes_on_from_a_folder_compares_what_it_names_and_takes_nothing_over(hostile):
    with pytest.raises(ConfigurationError, match="the file of --data-path is not the one"):
        find_checkpoint(going_on(hostile))  # all options fit; the fixture wrote no digest of its data
    hostile.options(reward_fns=[hostile.source()])
    with pytest.raises(ConfigurationError, match="--reward-fns: .*, but it was .*evil.py:run"):
        find_checkpoint(going_on(hostile))
    hostile.options(reward_fns=["countdown", "format"], engine=hostile.source(), policy_loss=hostile.source())
    config = going_on(hostile)
    with pytest.raises(ConfigurationError, match="--data-path"):
        find_checkpoint(config)
    assert config.policy_loss == "ppo_clip" and not hostile.canary.path.exists()


def test_what_a_manifest_says_cannot_steer_the_terminal(hostile):
    hostile.options(reward_fns=["\x1b]0;evil\x07"])
    with pytest.raises(ConfigurationError) as refused:
        find_checkpoint(going_on(hostile))
    assert "\x1b" not in str(refused.value)


def test_a_hostile_checkpoint_is_not_gone_on_from(hostile):
    hostile.zeros("0.safetensors")
    with pytest.raises(ConfigurationError, match="which its manifest.json does not name"):
        find_checkpoint(going_on(hostile))


STATES: dict[str, Any] = {
    "brackets": "[" * 10**6,
    "a list": "[]",
    "no groups": {"groups": 3},
    "a group of no kind": {"groups": [3]},
    "a question that is not there": {"groups": [GROUP | {"question": 10**9}]},
    "a question from the end": {"groups": [GROUP | {"question": -1}]},
    "a number as text": {"groups": [GROUP | {"number": "1"}]},
    "more tokens than there are": {"groups": [GROUP | {"samples": [{"tokens": 10**9}]}]},
    "fewer than none": {"groups": [GROUP | {"samples": [{"tokens": -5}]}]},
    "a sample without a text": {"groups": [GROUP | {"samples": [{"tokens": 1, "finish_reason": "stop"}]}]},
    "a step that is text": {"groups": [], "step": "1"},
    "a key of its own": {"groups": [], "evil": 1},
}


@pytest.mark.parametrize("kind", STATES)
def test_groups_alive_that_no_run_has_written_are_refused_by_name(tmp_path, kind):
    content = STATES[kind]
    if isinstance(content, dict):
        content = json.dumps({"step": 1, "admitted": 2, "cursor": {}} | content)
    (tmp_path / "experience.json").write_text(content)
    save_file({"token_ids": torch.zeros(4, dtype=torch.int32)}, tmp_path / "experience.safetensors")
    questions = [Question(np.zeros(2, np.int32), {}) for _ in range(3)]
    with pytest.raises(CheckpointBroken, match="the groups alive cannot be read"):
        ExperienceState.load(tmp_path, PromptCursor(questions, 0).prompt)


def test_a_pipe_in_the_place_of_the_groups_alive_is_not_waited_for(tmp_path):
    (tmp_path / "experience.json").write_text(
        json.dumps({"step": 1, "admitted": 2, "cursor": {}, "groups": []})
    )
    os.mkfifo(tmp_path / "experience.safetensors")
    with pytest.raises(CheckpointBroken, match="is not a regular file"):
        ExperienceState.load(tmp_path, PromptCursor([], 0).prompt)
