"""Wrong settings, inputs and surroundings, through `run` and `doctor`: refused with reason and cure, nothing left."""

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from early_starts import nothing_early

from async_grpo.__main__ import main
from async_grpo.data import COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.launch import check, doctor, local_run

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [  # beside a run that could work: what is changed, the reason, the cure
    ({"lerning-rate": 1e-6}, "--lerning-rate is no option", "did you mean --learning-rate"),
    ({"num-training-batches": "many"}, "'--num-training-batches' / '--max-steps': 'many' is not a whole number", "--help"),
    ({"batch-size": 0}, "--batch-size must be above 0, not 0", "must be above 0"),
    ({"nproc-per-node": 0}, "--nproc-per-node must be above 0, not 0", "must be above 0"),
    ({"learning-rate": -1}, "--learning-rate must be above 0, not -1.0", "must be above 0"),
    ({"learning-rate": "nan"}, "--learning-rate nan", "it must be a finite number"),
    ({"kl-coef": -0.1}, "--kl-coef cannot be negative, not -0.1", "cannot be negative"),
    ({"samples-per-question": 1}, "a group of one has nothing to compare with", "give at least 2"),
    ({"min-valid-samples": 9}, "--min-valid-samples 9 --samples-per-question 4 do not fit", "must lie between 2"),
    ({"train-minibatch-size": 6}, "a step is not a whole number of groups of 4", "use 4"),
    ({"batch-size": 4, "train-minibatch-size": 12}, "the batch is not a whole number of steps", "use a multiple"),
    ({"groups-alive": 99}, "--groups-alive 99 --max-staleness 1 do not fit", "give a number between them"),
    ({"max-num-seqs": 1, "overhead-seqs": 2}, "a group of 4 (--samples-per-question)", "--max-num-seqs + --overhead-seqs"),
    ({"top-p": 1.5}, "--top-p is a share above 0 and at most 1", "not 1.5"),
    ({"policy-loss": "ppo"}, "--policy-loss 'ppo' is unknown", "known: "),
    ({"advantage-estimator": "grpoo"}, "--advantage-estimator 'grpoo' is unknown", "did you mean grpo"),
    ({"lr-scheduler": "cosine", "num-training-batches": 5}, "decays until the run's end at step 5", "beyond the warm-up"),
    ({"importance-level": "token"}, "correct twice for the engine's policy", "Use --old-policy"),
    ({"loss-options": "cap=1,cap=2"}, "cap is given twice", "--loss-options"),
    ({"weight-transport": "nccl"}, "--weight-transport nccl needs GPUs", "object_store, shared_files work everywhere"),
    ({"engine": "tgi"}, "--engine 'tgi' is unknown", "known: vllm, fake"),
    ({"engine-python": "/no/python"}, "--engine-python /no/python: there is no such file", "of the engines' environment"),
    ({"engine-options": "block_size"}, "'block_size' is not name=value", "--engine-options"),
    ({"max-tokens-per-gpu": 30}, "cannot fit --max-tokens-per-gpu 30", "lower --max-generation-tokens"),
    ({"overlong-buffer": 0.01}, "is less than one token", "give a larger share"),
    ({"eval-every": 5}, "--eval-every 5 does nothing", "--eval-data-path"),
    ({"dump-samples-filename": "a/b"}, "--dump-samples-filename a/b must be a plain name", "it goes to --output-dir"),
    ({"track": "wandbb"}, "--track wandbb: unknown wandbb", "known: tensorboard"),
    ({"logging-level": "LOUD"}, "--logging-level 'LOUD'", "use DEBUG"),
    ({"reward-fns": ""}, "name the rewards of the run", "--reward-fns countdown,format"),
    ({"reward-fns": "countdwn"}, "unknown reward function countdwn", "did you mean countdown"),
    ({"reward-fns": "llm_judge"}, "LLMJudge has no address", "give --judge-urls"),
    ({"reward-options": "colour=1"}, "takes the option colour", "or leave the option out"),
    ({"reward-env": "NO_SUCH_KEY"}, "this process has no variable NO_SUCH_KEY", "set it, or leave it out"),
    ({"judge-urls": "http://127.0.0.1:1"}, "--judge-urls http://127.0.0.1:1 does nothing", "which ask no server"),
    ({"judge-model": "/no/judge"}, "--judge-model /no/judge is no folder here", "--judge-model"),
    ({"ray-address": "127.0.0.1:1"}, "--ray-address 127.0.0.1:1: nothing listens there", "Connection refused"),
    ({"resume": "/no/checkpoint"}, "--resume /no/checkpoint", "name another checkpoint, auto or never"),
    ({"model-name-or-path": "/no/model"}, "'/no/model' is not a folder", "hf download"),
    ({"data-path": "/no/data.jsonl"}, "/no/data.jsonl: there is no such file", "there is no such file"),
    ({"eval-data-path": "/no/held-out.jsonl"}, "/no/held-out.jsonl: there is no such file", "there is no such file"),
]  # fmt: skip


def options(folder: Path, **changes: object) -> list[str]:
    """Of a run that could work in `folder`, but for the changes."""
    (folder / "data.jsonl").write_text("".join(COUNTDOWN_TRAIN.read_text().splitlines(keepends=True)[:8]))
    given = {
        "model-name-or-path": TINY_MODEL,
        "data-path": folder / "data.jsonl",
        "output-dir": folder / "run",
    }
    given |= {
        "reward-fns": "countdown",
        "batch-size": 4,
        "samples-per-question": 4,
        "max-generation-tokens": 24,
    }
    return [f"--{name}={value}" for name, value in (given | changes).items()]


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def refusal(command: str, arguments: list[str], folder: Path, capsys) -> str:
    """What the command says, which must end with code 2 and leave no process and no file."""
    children, files = set(psutil.Process().children(recursive=True)), contents(folder)
    with pytest.raises(SystemExit) as ended:
        main([command, *arguments])
    said = capsys.readouterr()
    assert ended.value.code == 2, said
    assert set(psutil.Process().children(recursive=True)) <= children
    assert contents(folder) == files
    return said.out + said.err


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch):
    """What should have been refused ends the test, and the doctor's slow look is tried elsewhere."""
    monkeypatch.setattr(local_run, "start", lambda *_: pytest.fail("the run was started"))
    monkeypatch.setattr(local_run, "early_start", nothing_early)
    monkeypatch.setattr(doctor, "all_reduce", list)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("command", ["run", pytest.param("doctor", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("changes", "reason", "cure"), SETTINGS, ids=[" ".join(map(str, one[0])) for one in SETTINGS]
)
def test_a_wrong_setting(command, changes, reason, cure, tmp_path, capsys):
    said = refusal(command, options(tmp_path, **changes), tmp_path, capsys)
    assert reason in said and cure in said


def broken_model(folder: Path, *without: str) -> Path:
    """A copy of the tiny model."""
    shutil.copytree(TINY_MODEL, folder / "model")
    for name in without:
        (folder / "model" / name).unlink()
    return folder / "model"


def no_config(folder):
    return {"model-name-or-path": broken_model(folder, "config.json")}, "has no config.json", "hf download"


def config_is_no_json(folder):
    model = broken_model(folder)
    (model / "config.json").write_text("{")
    return {"model-name-or-path": model}, "cannot be used", "valid JSON file"


def tokenizer_is_cut_short(folder):
    model = broken_model(folder)
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text[: len(text) // 2])
    return {"model-name-or-path": model}, "the tokenizer in", "copy the tokenizer's files"


def no_weights(folder):
    return (
        {"model-name-or-path": broken_model(folder, "model.safetensors")},
        "holds no weights",
        "hf download",
    )


def weights_are_cut_short(folder):
    model = broken_model(folder)
    os.truncate(model / "model.safetensors", 100_000)
    return {"model-name-or-path": model}, "model.safetensors cannot be read", "hf download"


def a_shard_is_missing(folder):
    model = broken_model(folder)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return {"model-name-or-path": model}, "model-00002-of-00002.safetensors cannot be read", "hf download"


def a_row_is_no_json(folder):
    (folder / "bad.jsonl").write_text('{"input_token_ids": [5]}\n{broken\n')
    return {"data-path": folder / "bad.jsonl"}, "bad.jsonl, line 2: not JSON", "line 2"


def data_of_another_tokenizer(folder):
    (folder / "bad.jsonl").write_text('{"input_token_ids": [100000]}\n')
    return (
        {"data-path": folder / "bad.jsonl"},
        "outside the model's vocabulary",
        "tokenised for another model",
    )


def a_reward_file_that_cannot_be_imported(folder):
    (folder / "mine.py").write_text("import no_such_module\n\n\ndef mine(sample):\n    return 1.0\n")
    return {"reward-fns": f"{folder / 'mine.py'}:mine"}, "no_such_module", "mine.py"


def a_registry_that_is_missing(folder):
    return {"reward-registry": folder / "none.py"}, "none.py", "No such file"


def output_is_a_file(folder):
    (folder / "file").touch()
    return {"output-dir": folder / "file"}, "file", "another"


def output_cannot_be_written(folder):
    return {"output-dir": "/proc/run"}, "/proc", "another --output-dir"


def output_holds_a_run(folder):
    (folder / "run").mkdir()
    (folder / "run" / "training_metrics.jsonl").write_text('{"step": 1}\n')
    return {"resume": "never"}, "already holds a run", "--resume auto"


INPUTS = [
    *(no_config, config_is_no_json, tokenizer_is_cut_short, no_weights, weights_are_cut_short, a_shard_is_missing),
    *(a_row_is_no_json, data_of_another_tokenizer, a_reward_file_that_cannot_be_imported, a_registry_that_is_missing),
    *(output_is_a_file, output_cannot_be_written, output_holds_a_run),
]  # fmt: skip


@pytest.mark.parametrize("command", ["run", "doctor"])
@pytest.mark.parametrize("wrong", INPUTS, ids=[one.__name__ for one in INPUTS])
def test_a_broken_file_or_folder(command, wrong, tmp_path, capsys):
    changes, reason, cure = wrong(tmp_path)
    said = refusal(command, options(tmp_path, **changes), tmp_path, capsys)
    assert reason in said and cure in said


def full_disk(monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=9_000_000))
    return "disk", "9.0 MB free in ", "another --output-dir"


def few_open_files(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    return "open files", "at most 100 in a process", "ulimit -n 65536"


def no_engine(monkeypatch):
    for module in (check.importlib.util, doctor):
        real = module.find_spec
        monkeypatch.setattr(
            module, "find_spec", lambda name, real=real: None if name == "vllm" else real(name)
        )
    return "vLLM", "vLLM is not installed here", "async-grpo[cpu]"


def too_few_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return (
        "GPUs",
        "2 GPUs are needed (ranks 1, engines and logprob workers 1",
        "CUDA_VISIBLE_DEVICES= for the CPU",
    )


@pytest.mark.parametrize("command", ["run", "doctor"])
@pytest.mark.parametrize("broken", [full_disk, few_open_files, no_engine, too_few_gpus])
def test_broken_surroundings(command, broken, tmp_path, capsys, monkeypatch):
    arguments, told = options(tmp_path), broken(monkeypatch)
    said = refusal(command, arguments, tmp_path, capsys)
    assert all(one in said for one in told), said


def test_a_file_of_options_that_is_no_toml_or_holds_an_unknown_one(tmp_path, capsys):
    for text, said in (
        ("batch_size =", "run.toml cannot be read"),
        ("batchsize = 3", "did you mean batch_size"),
    ):
        (tmp_path / "run.toml").write_text(text)
        for command in ("run", "doctor"):
            assert said in refusal(command, [str(tmp_path / "run.toml")], tmp_path, capsys)


@pytest.mark.parametrize(
    ("command", "changes", "said"),
    [
        ("run", {"learning-rate": -1}, "--learning-rate must be above 0, not -1.0"),
        ("doctor", {"policy-loss": "ppo"}, "--policy-loss 'ppo' is unknown"),
        ("run", {"reward-fns": "countdwn"}, "did you mean countdown"),
        pytest.param(
            *("doctor", {"data-path": "/no/data.jsonl"}, "/no/data.jsonl: there is no such file"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_as_a_program_of_its_own_it_takes_seconds(command, changes, said, tmp_path):
    arguments = options(tmp_path, **changes)
    program = [sys.executable, "-m", "async_grpo", command, *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    files, began, before = contents(tmp_path), time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = psutil.Popen(
        program, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output, _ = done.communicate(timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{time.monotonic() - began:.1f} s, {busy:.1f} of them busy")  # other programs share the machine
    assert done.returncode == 2 and said in output, output
    assert contents(tmp_path) == files
    assert busy < 10
