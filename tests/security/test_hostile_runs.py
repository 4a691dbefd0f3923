"""A run's folder of somebody else's, looked at by every command: no code, no file of elsewhere, no traceback."""

import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_folders import SECRET, Canary, bounded, command, jsonl, link_to, now, replaced
from safetensors.numpy import save_file

from async_grpo.data import TINY_MODEL
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.metrics.console import show_times
from async_grpo.metrics.tail import last_lines
from async_grpo.metrics.writer import claim
from async_grpo.observe.run_view import RunView
from async_grpo.observe.samples import SamplesConfig, samples_page
from async_grpo.observe.watch import WatchConfig, application, data
from async_grpo.rewards.cache.file import APPLICATION_ID

pytestmark = pytest.mark.timeout(240)
OPTIONS = {
    "samples_per_question": 8,
    "batch_size": 4,
    "train_minibatch_size": None,
    "num_training_batches": 100,
    "model_name_or_path": str(TINY_MODEL),
    "dump_samples_filename": "samples.jsonl",
    "settings": {"stop_token_ids": [3]},
}


class Run:
    """A folder of three steps, as a run writes it, and what it would run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary = folder / "run", Canary(folder / "it-ran")
        self.secret = folder / "secret.jsonl"
        self.secret.write_text(jsonl({"step": 1, "input": SECRET, "completion": SECRET, "error": SECRET}))
        self.folder.mkdir()
        self.options()
        self.write("training_metrics.jsonl", *(self.step(number) for number in (1, 2, 3)))
        self.write(
            "samples.jsonl", {"step": 3, "input": "1+1", "completion": "two", "group": 0, "advantage": 1.0}
        )
        spans = {"lane": "trainer 0", "what": "train", "begin": now(), "end": now() + 1, "step": 3}
        self.write("timeline.jsonl", spans)
        self.write("eval_metrics.jsonl", {"step": 3, "eval_avg_reward": 0.25, "eval_avg_reward_ci": None})

    def step(self, number: int) -> dict[str, Any]:
        return {
            "step": number,
            "timestamp": now(),
            "time_per_batch": 2.0,
            "avg_reward": 0.5,
            "total_samples_accumulated": 8 * number,
            "verifiers": {"math": {"ok": 30, "busy_s": 1.0}},
        }

    def options(self, **changes: Any) -> None:
        (self.folder / "training_params.json").write_text(json.dumps(OPTIONS | changes))

    def write(self, name: str, *lines: Any) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(jsonl(*lines))
        return path

    def raw(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def put(self, name: str, make: Callable[[Path], Any]) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        replaced(path, make)

    def checkpoint(self, content: str) -> None:
        self.raw("checkpoints/step_000000003/manifest.json", content)

    def record(self, content: bytes) -> None:
        self.raw("record/step_000000002/rank_0.safetensors", content)
        self.raw("record/step_000000002/rank_0.json", "{}")

    def recorded_of_a_hostile_model(self) -> None:
        model = self.folder / "model"
        shutil.copytree(TINY_MODEL, model)
        self.canary.source(model, "evil.py")
        config = json.loads((model / "tokenizer_config.json").read_text())
        content = config | {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
        (model / "tokenizer_config.json").write_text(json.dumps(content))
        self.options(model_name_or_path=str(model))
        self.record(b"")
        save_file(
            {"0.cu_seqlens": np.zeros(2, np.int32)}, self.folder / "record/step_000000002/rank_0.safetensors"
        )


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path)


ODD_LINES = (
    {"step": "three"},
    {"step": -1},
    {"step": 10**400},
    {"step": 4, "time_per_batch": "long", "timestamp": [], "alarms": 7, "verifiers": [1], "avg_reward": {}},
    {"step": 5, "time_per_batch": 1e300, "timestamp": -1e300, "verifiers": {"[/red]": {"ok": "x"}}},
    {"step": 6, "verifiers": {"[/red]": {"ok": 1, "failed": None}, "b": 3}, "staleness_tokens": [1]},
    {"step": 7, "num_reward_failed": 3, "alarms": ["[bold]", 3, None], "judge_budget_spent": "all"},
    {"step": 8, "a": {"b": {"c": "d"}}, "samples_per_second": "x", "loss": True, "file": 3},
    [1],
    "text",
    None,
)

LARGEST = 1.7e308  # below the largest float; two of them are beyond it
BEYOND_ALL_FLOATS = [
    {
        "step": step,
        "time_per_batch": LARGEST,
        "seconds_waiting": LARGEST,
        "seconds_training": LARGEST,
        "avg_reward": LARGEST,
        "judge_budget_spent": -LARGEST,
        "timestamp": -LARGEST,
        "verifiers": {"a": {"ok": LARGEST, "busy_s": LARGEST, "latency_p50_s": LARGEST}},
    }
    for step in range(1, 31)
]

FOLDERS: dict[str, Callable[[Run], Any]] = {
    "metrics that are a pipe": lambda r: r.put("training_metrics.jsonl", os.mkfifo),
    "metrics that are a device": lambda r: r.put("training_metrics.jsonl", link_to("/dev/zero")),
    "metrics that lie elsewhere": lambda r: r.put("training_metrics.jsonl", link_to(r.secret)),
    "metrics of odd lines": lambda r: r.write("training_metrics.jsonl", *ODD_LINES),
    "metrics whose sums are beyond all floats": lambda r: r.write(
        "training_metrics.jsonl", *BEYOND_ALL_FLOATS
    ),
    "metrics whose times are beyond all dates": lambda r: r.write(
        "training_metrics.jsonl",
        *[r.step(1) | {"time_per_batch": 1e30, "timestamp": sign * 1e30} for sign in (1, -1)],
    ),
    "metrics of brackets": lambda r: r.raw(
        "training_metrics.jsonl", "[" * 10**6 + "\n" + '{"a":' * 900 + "\n"
    ),
    "metrics of half pairs of surrogates": lambda r: r.write(
        "training_metrics.jsonl", r.step(1) | {"\ud800": 1, "alarms": ["\udfff"], "file": "\ud800"}
    ),
    "metrics of bytes": lambda r: r.raw("training_metrics.jsonl", bytes(range(256)) * 1000),
    "metrics in one line of 40 MB": lambda r: r.raw(
        "training_metrics.jsonl",
        b'{"step": 1, "a": "' + b"x" * (40 << 20) + b'"}\n' + jsonl(r.step(2)).encode(),
    ),
    "metrics without an end of 80 MB": lambda r: r.raw("training_metrics.jsonl", b"{}" * (40 << 20)),
    "parameters of brackets": lambda r: r.raw("training_params.json", "[" * 10**6),
    "parameters that are a list": lambda r: r.raw("training_params.json", "[1]"),
    "parameters that are a pipe": lambda r: r.put("training_params.json", os.mkfifo),
    "parameters that lie elsewhere": lambda r: r.put("training_params.json", link_to(r.secret)),
    "parameters without numbers": lambda r: r.options(
        samples_per_question="8", batch_size=None, num_training_batches=[], max_staleness="[", settings=3
    ),
    "parameters of zeros": lambda r: r.options(samples_per_question=0, batch_size=0, num_training_batches=-1),
    "samples that are said to lie elsewhere": lambda r: r.options(dump_samples_filename=str(r.secret)),
    "samples that are said to lie above": lambda r: r.options(dump_samples_filename="../secret.jsonl"),
    "samples that are a link": lambda r: r.put("samples.jsonl", link_to(r.secret)),
    "samples that are a pipe": lambda r: r.put("samples.jsonl", os.mkfifo),
    "samples of odd lines": lambda r: r.write(
        "samples.jsonl", {}, {"step": 1}, {"step": 1, "input": 3, "completion": []}, 7, *ODD_LINES
    ),
    "evaluations of odd names": lambda r: [
        r.put(f"eval_samples_{name}.jsonl", make)
        for name, make in {"x": Path.touch, "1_\U0001f600": os.mkfifo, "9" * 99: Path.touch}.items()
    ],
    "evaluations of odd lines": lambda r: r.write(
        "eval_metrics.jsonl",
        *ODD_LINES,
        {"step": 1, "eval_avg_reward": "x", "eval_avg_reward_ci": 1, "a": 1, "a_ci": "x"},
    ),
    "a stall that is a pipe": lambda r: r.put("stalls/20260101-000000_step3/why.txt", os.mkfifo),
    "a stall that lies elsewhere": lambda r: r.put("stalls/20260101-000000_step3/why.txt", link_to(r.secret)),
    "a stall that steers the terminal": lambda r: r.raw("stalls/a/why.txt", b"\x1b]0;evil\x07\xff\n\x1b[2J"),
    "logs that lie elsewhere": lambda r: (
        r.put("logs/trainer.log", link_to(r.secret)),
        (r.folder / "training_metrics.jsonl").unlink(),
    ),
    "logs that steer the terminal": lambda r: (
        r.raw("logs/trainer.log", b"error: \x1b]0;evil\x07\n"),
        (r.folder / "training_metrics.jsonl").unlink(),
    ),
    "a folder of logs that lies elsewhere": lambda r: (
        (r.folder.parent / "trainer.log").write_text(f"error: {SECRET}\n"),
        (r.folder / "logs").symlink_to(r.folder.parent),
        (r.folder / "training_metrics.jsonl").unlink(),
    ),
    "a lock that names no process": lambda r: r.raw(".lock", "\u00b2"),
    "a lock that names a process beyond all": lambda r: r.raw(".lock", "9" * 30),
    "a lock that is a pipe": lambda r: r.put(".lock", os.mkfifo),
    "spans of odd kinds": lambda r: r.write(
        "timeline.jsonl",
        *ODD_LINES,
        {"lane": 1, "what": "train", "begin": 0, "end": 1, "step": 1},
        {"lane": "a", "what": "train", "begin": 0, "end": 1e300, "step": 1},
        {"lane": "a", "what": "train", "begin": float("nan"), "end": 1, "step": 1},
    ),
    "a checkpoint of brackets": lambda r: r.checkpoint("[" * 10**6),
    "a checkpoint of a pipe": lambda r: r.put("checkpoints/step_000000003/manifest.json", os.mkfifo),
    "checkpoints of odd names": lambda r: r.raw("checkpoints/step_many/manifest.json", "{}"),
    "a record of bytes": lambda r: r.record(b"\xff" * 500),
    "a record that is a pipe": lambda r: r.put("record/step_000000002/rank_0.safetensors", os.mkfifo),
    "a record of a hostile model": lambda r: r.recorded_of_a_hostile_model(),
}


def looked_at(run: Run, capfd) -> str:
    """Run every command that reads a run's folder; returns all that they show."""
    folder, shown = run.folder, ""
    pictures = folder.parent / "pictures"
    pictures.mkdir(exist_ok=True)
    for arguments in (
        ("status", folder, "--once"),
        ("why", folder),
        ("samples", folder, "-o", pictures / "samples.html"),
        ("samples", folder, "--evaluation", "-o", pictures / "evaluation.html"),
        ("plot", "info", folder),
        ("plot", "info", folder, folder),
        ("plot", "timeline", folder, "-o", pictures / "timeline.svg"),
        ("plot", "staleness", folder, "-o", pictures / "staleness.svg"),
        ("plot", "compare", folder, "-x", "gpu-hours", "-o", pictures / "compare.svg"),
        ("replay", folder, "--output-dir", folder.parent / "replayed"),
        ("export", folder, "--output-dir", folder.parent / "exported"),
    ):
        ended = command(capfd, *arguments)
        assert ended.code == 0 or ended.is_named_error, (arguments, ended.text)
        shown += ended.text
    with bounded():
        for look in (
            lambda: application(WatchConfig(path=str(folder))),
            lambda: json.dumps(data(RunView(folder), 0)),
            lambda: samples_page(SamplesConfig(path=str(folder))),
            lambda: show_times(folder),
        ):
            try:
                shown += str(look())
            except AsyncGrpoError as error:
                shown += str(error)
    for page in pictures.glob("*.html"):
        shown += page.read_text()
    return shown + "".join(capfd.readouterr())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_hostile_run_is_shown_or_refused_in_a_sentence(run, capfd, kind):
    FOLDERS[kind](run)
    shown = looked_at(run, capfd)
    assert SECRET not in shown and "\x1b]" not in shown
    assert not run.canary.path.exists()


def test_the_run_itself_is_shown(run, capfd):
    shown = looked_at(run, capfd)
    shown = " ".join(shown.split())
    for word in ("step 3 of 100", "two", "avg_reward", "mean reward 0.250"):
        assert word in shown, word


def test_odd_lines_are_passed_over_and_the_others_shown(run, capfd):
    run.write("training_metrics.jsonl", run.step(1), *ODD_LINES, run.step(9))
    ended = command(capfd, "status", run.folder, "--once")
    shown = " ".join(ended.out.split())  # it is broken into lines of the terminal's width
    assert ended.code == 0 and "step 9 of 100" in shown and "reward 0.500" in shown


def test_a_long_line_is_skipped_said_so_and_the_one_behind_it_shown(run, capfd, caplog):
    run.raw("training_metrics.jsonl", b"x" * (20 << 20) + b"\n" + jsonl(run.step(2)).encode())
    with bounded(), caplog.at_level("WARNING", "async_grpo"):
        assert [
            json.loads(line)["step"] for line in last_lines(run.folder / "training_metrics.jsonl", 5)
        ] == [2]
    assert "1 lines of more than 8 MB are not read" in caplog.text


def test_no_process_gets_a_signal_because_a_folder_names_it(run, capfd):
    """This process awaits SIGUSR1, as many do; only one that has the run's lock open is asked by it."""
    asked: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: asked.append(number))
    try:
        run.raw(".lock", str(os.getpid()))
        ended = command(capfd, "why", run.folder)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.code == 0 and not asked, ended.text


CODE: dict[str, Callable[[Run], dict[str, Any]]] = {
    "a loss": lambda r: {"policy_loss": f"{r.canary.source(r.folder)}:run"},
    "an estimator": lambda r: {"advantage_estimator": f"{r.canary.source(r.folder)}:run"},
    "a transport": lambda r: {"weight_transport": f"{r.canary.source(r.folder)}:run"},
    "a transport of the settings": lambda r: {
        "settings": {"transport": f"{r.canary.source(r.folder)}:run"} | SETTINGS
    },
    "an engine": lambda r: {"engine": f"{r.canary.source(r.folder)}:run"},
    "rewards": lambda r: {"reward_fns": [f"{r.canary.source(r.folder)}:run"]},
    "a schedule": lambda r: {"scheduling": f"{r.canary.source(r.folder)}:run"},
    "trackers": lambda r: {"track": "wandb"},
}
SETTINGS = {
    "run_name": "r",
    "model_fingerprint": "",
    "vocab_size": 100,
    "dtype": "float32",
    "temperature": 1.0,
    "max_total_tokens": 64,
    "max_completion_tokens": 16,
    "logprob_roles": [],
    "seed": 0,
    "stop_token_ids": [3],
}


@pytest.mark.parametrize("kind", CODE)
def test_a_replay_runs_nothing_that_the_record_names(run, capfd, kind):
    run.options(**{"settings": SETTINGS | {"transport": "object_store"}} | CODE[kind](run))
    run.raw("record/step_000000000/rank_0.json", json.dumps({"world_size": 1, "options": {}, "dummies": 3}))
    ended = command(capfd, "replay", run.folder)
    assert ended.is_named_error, ended.text
    flag = {"a loss": "--policy-loss", "an estimator": "--advantage-estimator"}.get(kind, "the record")
    assert flag in ended.err, ended.err
    assert not run.canary.path.exists()


@pytest.mark.parametrize("name", ["training_metrics.jsonl", "training_params.json", "eval_metrics.jsonl"])
def test_a_run_does_not_write_through_the_links_of_a_folder(run, name):
    target = run.folder.parent / "target"
    target.write_text("precious")
    run.put(name, link_to(target))
    with pytest.raises(ConfigurationError, match="is no regular file"):
        claim(run.folder, may_hold_run=True)
    assert target.read_text() == "precious"


def test_a_verdict_cache_of_another_kind_is_refused(tmp_path, capfd):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "bytes").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE verdicts (key)")
    with sqlite3.connect(tmp_path / "endless") as endless:
        endless.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        numbers = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS key"
        columns = ("adapter", "hits", "size", "created", "last_used", "cost")
        values = "".join(f", x AS {column}" for column in columns)
        endless.execute(f"CREATE VIEW verdicts AS {numbers}{values} FROM c")
    for name in ("pipe", "zero", "bytes", "other", "endless"):
        assert command(capfd, "cache", tmp_path / name).is_named_error
