"""Bad input: a clear error at start, exit code 2, and nothing started (`async-grpo run` refuses before it starts Ray)."""

import json
from pathlib import Path

import psutil
import pytest

from async_grpo.__main__ import main
from async_grpo.programs import trainer as trainer_core

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "sample-data"


def refusal(capsys, command=main, **changes) -> str:
    """The message with which the command refuses these settings; it must end with code 2 and start no process."""
    options = {
        "model-name-or-path": DATA / "tiny-model",
        "data-path": DATA / "countdown_train.jsonl",
        "reward-fns": "countdown",
        "batch-size": 4,
        "samples-per-question": 4,
        "max-generation-tokens": 24,
    } | changes
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    before = set(psutil.Process().children(recursive=True))  # other tests may keep a process of theirs
    with pytest.raises(SystemExit) as ended:
        command((["run"] if command is main else []) + arguments)
    assert ended.value.code == 2
    assert set(psutil.Process().children(recursive=True)) <= before
    return capsys.readouterr().err


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    return path


GOOD = json.dumps({"input_token_ids": [1, 2, 3], "input": "abc", "answer": 1}) + "\n"


@pytest.mark.parametrize("command", [main, trainer_core.main], ids=["async-grpo run", "trainer_core.py"])
def test_a_missing_data_file(capsys, tmp_path, command):
    assert "none.jsonl: there is no such file" in refusal(
        capsys, command, **{"data-path": tmp_path / "none.jsonl", "output-dir": tmp_path}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "{broken\n", "line 2: not JSON"),
        (
            GOOD + GOOD + '{"answer": 3}\n',
            "line 3: a row needs input_token_ids, messages, or prompt/input text",
        ),
        (json.dumps({"input_token_ids": [1] * 5000}) + "\n", "line 1: a prompt of 5000 tokens"),
        (
            json.dumps({"input_token_ids": [10**6]}) + "\n",
            "line 1: token id 1000000 is outside the model's vocabulary",
        ),
        ("", "holds no questions"),
        (b"\xff\xfe".decode("latin-1"), "line 1: not JSON"),
        ('{"messages": []}\n', "line 1: messages must be a list of objects"),
        ('{"messages": [1, 2]}\n', "line 1: messages must be a list of objects"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(capsys, tmp_path, text, message):
    error = refusal(capsys, **{"data-path": written(tmp_path, text), "output-dir": tmp_path / "out"})
    assert message in error and "data.jsonl" in error


@pytest.mark.parametrize(
    ("judges", "combine", "message"),
    [
        (
            None,
            "best",
            "line 3: the column 'judge' of a row says None; it must name some of countdown, format, majority",
        ),
        ("", "best", "line 3: the column 'judge' of a row says ''"),
        ("countdwn", "best", "line 3: the column 'judge' of a row says 'countdwn'"),
        (
            "majority,format",
            "gate",
            "line 3: the column 'judge' says 'majority,format', but a gate decides before the gro",
        ),
    ],
)
@pytest.mark.parametrize("option", ["data-path", "eval-data-path"])
def test_a_row_whose_column_does_not_say_who_judges_it(capsys, tmp_path, option, judges, combine, message):
    rows = [{"input_token_ids": [1], "judge": judge} for judge in ("countdown", "format,majority", judges)]
    wrong = written(tmp_path, "\n".join(map(json.dumps, rows)))
    right = tmp_path / "right.jsonl"
    right.write_text(json.dumps(rows[0]))
    settings = {
        "reward-fns": "countdown,format,majority",
        "reward-combine": combine,
        "reward-column": "judge",
    }
    error = refusal(capsys, **{"data-path": right, "output-dir": tmp_path / "out", **settings, option: wrong})
    assert f"{wrong}, {message}" in error


def test_an_unknown_reward_lists_the_known_ones(capsys, tmp_path):
    error = refusal(capsys, **{"reward-fns": "countdwn", "output-dir": tmp_path})
    assert "countdwn" in error and all(
        name in error for name in ("countdown", "format", "math_verify", "mathd", "sympy")
    )


def test_no_reward_at_all(capsys, tmp_path):
    assert "name the rewards of the run" in refusal(capsys, **{"reward-fns": "", "output-dir": tmp_path})


def test_a_group_larger_than_any_worker(capsys, tmp_path):
    error = refusal(
        capsys, **{"samples-per-question": 32, "max-num-seqs": 16, "overhead-seqs": 8, "output-dir": tmp_path}
    )
    assert "a group of 32 (--samples-per-question) does not fit an engine of 24" in error


def test_a_sample_that_cannot_fit_the_token_budget(capsys, tmp_path):
    error = refusal(capsys, **{"max-tokens-per-gpu": 30, "output-dir": tmp_path})
    assert "cannot fit --max-tokens-per-gpu 30" in error


@pytest.mark.parametrize("missing", ["/no/such/model", "name-on-a-hub"])
def test_a_model_that_is_not_a_folder(capsys, tmp_path, missing):
    assert missing in refusal(capsys, **{"model-name-or-path": missing, "output-dir": tmp_path})


def test_an_output_folder_that_holds_a_run_already(capsys, tmp_path):
    (tmp_path / "training_metrics.jsonl").touch()
    assert "already holds a run" in refusal(capsys, **{"output-dir": tmp_path})


def test_the_demo_replaces_only_an_earlier_demo(capsys, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--output-dir", str(tmp_path)])
    assert ended.value.code == 2 and (tmp_path / "thesis.tex").exists()
    assert "not empty and not an earlier demo" in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written to" in refusal(capsys, **{"output-dir": tmp_path / "file" / "out"})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("advantage-estimator", "gro", "--advantage-estimator 'gro' is unknown; known: grpo, dr_grpo"),
        ("policy-loss", "pppo", "--policy-loss 'pppo' is unknown"),
        ("loss-aggregation", "sum", "sum"),
        ("kl-kind", "k9", "k9"),
        ("weight-transport", "nccl", "nccl needs GPUs"),
        ("max-staleness", "-1", "cannot be negative"),
        ("temperature", "nan", "--temperature nan: it must be a finite number"),
        ("train-minibatch-size", "-8", "--train-minibatch-size must be above 0"),
        ("samples-per-question", "1", "a group of one has nothing to compare with"),
        ("dump-samples-filename", "a/b.jsonl", "must be a plain name"),
        ("ray-address", "127.0.0.1:1", "nothing listens there"),
    ],
)
def test_settings_that_cannot_work(capsys, tmp_path, option, value, message):
    assert message in refusal(capsys, **{option: value, "output-dir": tmp_path})


def test_without_a_cluster_the_trainer_says_how_to_start_one(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    error = refusal(capsys, trainer_core.main, **{"output-dir": tmp_path})
    assert "nobody listens at RAY_ADDRESS 127.0.0.1:1" in error and "ray start --head" in error
