"""Parquet files, folders and data sets of the hub, as the packages of the extra `data` read them."""

import datetime
import decimal
import json
import logging
import math
import sys
from pathlib import Path

import pytest
from data_packages import PACKAGES, are_there

from async_grpo.config.resume import data_digests
from async_grpo.config.run import RunConfig
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.experience import data_files
from async_grpo.experience.data_config import DataConfig
from async_grpo.experience.data_files import digest_of_rows, read_rows
from async_grpo.experience.plain_values import plain
from async_grpo.experience.table_files import _with_json
from async_grpo.launch.python_rows import row_file

pytestmark = pytest.mark.skipif(not are_there(), reason="datasets is not there: scripts/setup_extras")
FORMATS = Path(__file__).parents[1] / "data" / "formats"
USER = [{"role": "user", "content": "a"}]
GROUND_TRUTH = DataConfig(prompt_column="prompt", answer_column="reward_model.ground_truth").column_map


@pytest.fixture(autouse=True)
def packages(monkeypatch, tmp_path):
    if "datasets" not in sys.modules:
        monkeypatch.syspath_prepend(PACKAGES)
    import datasets

    level = logging.getLogger().level
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    logging.getLogger().setLevel(level)


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (FORMATS / name).read_text().splitlines()]


def parquet(path: Path, rows: list[dict]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("name", ["verl", "dapo"])
def test_rows_of_verl_are_read_from_parquet(tmp_path, name):
    path = parquet(tmp_path / "train.parquet", rows_of(f"{name}.jsonl"))
    rows = [row for _, row in read_rows(path, GROUND_TRUTH)]
    expected = [row for _, row in read_rows(FORMATS / f"{name}.jsonl", GROUND_TRUTH)]
    assert rows == expected


def test_a_wrong_row_of_parquet_is_named_by_its_number(tmp_path):
    rows = [{"prompt": "a", "answer": 1.0}] * 700 + [{"prompt": "b", "answer": math.nan}]
    path = parquet(tmp_path / "train.parquet", rows)
    with pytest.raises(ConfigurationError, match=r"train.parquet, row 701: answer is NaN"):
        list(read_rows(path))


VALUES = {
    "a whole decimal": (decimal.Decimal("7.00"), 7),
    "a decimal": (decimal.Decimal("0.10"), "0.10"),
    "a date": (datetime.date(2026, 1, 2), "2026-01-02"),
    "a time": (datetime.datetime(2026, 1, 2, 3, 4), "2026-01-02 03:04:00"),
    "texts": (["a", "b"], ["a", "b"]),
    "a null": (None, None),
    "an object": ({"x": 1, "y": None}, {"x": 1, "y": None}),
    "objects of one list": ([{"x": 1}, {"y": [None, 2]}], [{"x": 1}, {"y": [None, 2]}]),
    "a message with calls": (
        [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, *USER],
        [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}, *USER],
    ),
    "messages with other keys": (
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "Anna"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "Anna"}],
    ),
    "a flag": (True, True),
    "a large number": (2**62, 2**62),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_arrow_become_those_of_json(tmp_path, kind):
    value, expected = VALUES[kind]
    path = parquet(tmp_path / "train.parquet", [{"prompt": "a", "value": value}])
    ((_, row),) = read_rows(path)
    assert row == {"prompt": "a", "value": expected}
    json.dumps(row)


def test_numbers_of_single_precision_keep_their_digits(tmp_path):
    import numpy
    import pyarrow
    import pyarrow.parquet as pq

    table = pyarrow.table(
        {"prompt": ["a"] * 4, "answer": pyarrow.array([0.1, 7.0, 1e-7, None], pyarrow.float32())}
    )
    pq.write_table(table, tmp_path / "train.parquet")
    answers = [row["answer"] for _, row in read_rows(tmp_path / "train.parquet")]
    assert answers == [0.1, 7.0, 1e-7, None]
    assert plain(numpy.float32(0.1)) == 0.1
    assert plain(numpy.float64(0.1 + 0.2)) == 0.1 + 0.2


def test_bytes_are_refused_by_row_and_column(tmp_path):
    path = parquet(tmp_path / "train.parquet", [{"prompt": "a", "image": {"bytes": b"\x89PNG\xff"}}])
    with pytest.raises(ConfigurationError, match=r"train.parquet, row 1: the column image holds a bytes"):
        list(read_rows(path))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 99 + b"PAR1", b'{"prompt": "a"}\n'])
def test_a_file_that_is_no_parquet_is_refused(tmp_path, content):
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(ConfigurationError, match="train.parquet: cannot be read as Parquet"):
        list(read_rows(tmp_path / "train.parquet"))


def test_two_columns_of_one_name_are_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"]
    )
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(
        ConfigurationError, match="data.parquet: two columns have the name 'prompt': rename or remove"
    ):
        list(read_rows(tmp_path / "data.parquet"))


def test_a_folder_of_parquet_files_has_splits(tmp_path):
    folder = tmp_path / "folder"
    parquet(folder / "data" / "train-00000-of-00002.parquet", [{"prompt": "a", "answer": "1"}])
    parquet(folder / "data" / "train-00001-of-00002.parquet", [{"prompt": "b", "answer": "2"}])
    assert [row["prompt"] for _, row in read_rows(folder)] == ["a", "b"]
    parquet(folder / "data" / "test-00000-of-00001.parquet", [{"prompt": None, "answer": "3"}])
    with pytest.raises(ConfigurationError, match=r"has several splits: name one of train, test, as .*:SPLIT"):
        list(read_rows(folder))
    with pytest.raises(ConfigurationError, match=r"folder:dev: its splits are train, test"):
        list(read_rows(f"{folder}:dev"))
    with pytest.raises(ConfigurationError, match=r"folder:test, row 1: a row needs input_token_ids"):
        list(read_rows(f"{folder}:test"))
    assert len(list(read_rows(f"{folder}:train"))) == 2


def test_a_folder_with_configurations_asks_for_one(tmp_path):
    folder = tmp_path / "folder"
    parquet(folder / "main" / "train-00000.parquet", [{"prompt": "a"}])
    parquet(folder / "socratic" / "train-00000.parquet", [{"prompt": "b"}])
    text = "---\nconfigs:\n"
    for name in ("main", "socratic"):
        text += f"- config_name: {name}\n  data_files: {name}/train-*\n"
    (folder / "README.md").write_text(text + "---\n")
    with pytest.raises(ConfigurationError, match="several configurations: name one of main, socratic"):
        list(read_rows(folder))
    for path in (f"{folder}:socratic", f"{folder}:socratic:train"):
        assert [row["prompt"] for _, row in read_rows(path)] == ["b"]


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    import datasets

    parquet(tmp_path / "here" / "train.parquet", [{"prompt": "a", "answer": "1"}])
    dataset = datasets.load_dataset(str(tmp_path / "here"), split="train")
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "two")
    assert [row for _, row in read_rows(tmp_path / "one")] == [{"prompt": "a", "answer": "1"}]
    assert [row for _, row in read_rows(f"{tmp_path}/two:test")] == [{"prompt": "a", "answer": "1"}]
    with pytest.raises(ConfigurationError, match="several splits: name one of train, test"):
        list(read_rows(tmp_path / "two"))


def test_an_empty_folder_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match="folder: `datasets` cannot read it"):
        list(read_rows(tmp_path / "folder"))


def test_the_rows_of_a_folder_are_those_of_the_run_that_goes_on(tmp_path):
    folder = tmp_path / "folder"
    parquet(folder / "train.parquet", [{"prompt": "a", "answer": "1"}])
    options = {"model_name_or_path": str(TINY_MODEL), "reward_fns": "exact"}
    config = RunConfig(**options, data_path=str(folder))
    digests = data_digests(config)
    assert digests == data_digests(config) == {"data_path": digest_of_rows(folder)}
    parquet(folder / "train.parquet", [{"prompt": "a", "answer": "2"}])
    assert data_digests(config) != digests


def test_without_the_packages_the_error_says_how_to_install_them(tmp_path, monkeypatch):
    path = parquet(tmp_path / "train.parquet", [{"prompt": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in (path, tmp_path, "owner/name"):
        with pytest.raises(
            ConfigurationError, match=r"pip install 'async-grpo\[data\]', or write the rows as JSONL"
        ):
            list(read_rows(name))


def test_rows_of_a_dataset_in_python_are_read_like_those_of_its_file(tmp_path):
    import datasets

    parquet(tmp_path / "here" / "train.parquet", rows_of("verl.jsonl"))
    dataset = datasets.load_dataset(str(tmp_path / "here"), split="train")
    file = row_file(dataset, tmp_path, "dataset", GROUND_TRUTH)
    expected = [row for _, row in read_rows(FORMATS / "verl.jsonl", GROUND_TRUTH)]
    assert [row for _, row in read_rows(file.path, GROUND_TRUTH)] == expected
    assert {"answer", "messages", "reward_model"} <= file.columns


def test_a_data_set_of_the_hub_is_asked_for_by_name_split_and_configuration(tmp_path, monkeypatch):
    import datasets

    folder = tmp_path / "there"
    parquet(folder / "train.parquet", [{"question": "a", "answer": "#### 1"}])
    load, names = datasets.load_dataset, []
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["main", "socratic"])
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: ["train", "test"])

    def from_folder(name, config, split):
        names.append((name, config, split))
        return load(str(folder), split="train")

    monkeypatch.setattr(datasets, "load_dataset", from_folder)
    columns = DataConfig(prompt_column="question").column_map
    ((place, row),) = read_rows("openai/gsm8k:main:train", columns)
    assert place == "openai/gsm8k:main:train, row 1" and row["messages"] == USER
    assert names == [("openai/gsm8k", "main", "train")]
    for path, message in {
        "openai/gsm8k": "several configurations: name one of main, socratic, as openai/gsm8k:CONFIGURATION:SPLIT",
        "openai/gsm8k:main": "several splits: name one of train, test",
        "openai/gsm8k:other:train": "its configurations are main, socratic",
    }.items():
        with pytest.raises(ConfigurationError, match=message):
            list(read_rows(path, columns))


def test_offline_the_hub_is_not_asked_and_the_error_says_so(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ConfigurationError, match=r"HF_HUB_OFFLINE is set, .*hf download a/b --repo-type dataset"
    ):
        list(read_rows("a/b"))


@pytest.mark.parametrize(
    ("path", "is_data_set"),
    [
        ("openai/gsm8k", True),
        ("openai/gsm8k:main:train", True),
        ("BytedTsinghua-SIA/DAPO-Math-17k", True),
        ("data/train.jsonl", False),
        ("data/train.parquet", False),
        ("data/train.csv.gz", False),
        ("/data/train", False),
        ("data/gsm8k/train", False),
        ("train", False),
    ],
)
def test_a_name_of_the_hub_is_told_from_that_of_a_file(path, is_data_set):

    assert data_files.names_data_set(Path(path)) == is_data_set


# Name of a file in a folder -> its content, and the prompts and answers as they stand in it
TEXTS = {
    "train.csv": ("prompt,answer\na,007\nb,NA\nc,1e5\n", [("a", "007"), ("b", "NA"), ("c", "1e5")]),
    "train.tsv": ("prompt\tanswer\na\t007\n", [("a", "007")]),
    "train.jsonl": ('{"prompt": "a", "answer": 7}\n{"prompt": "b", "answer": "8"}\n', [("a", 7), ("b", "8")]),
    "train.json": ('[{"prompt": "a", "answer": "1.0"}]', [("a", "1.0")]),
    "data.jsonl": ('{"prompt": "a", "answer": [1]}\n{"prompt": "b", "answer": 2}\n', [("a", [1]), ("b", 2)]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_in_a_folder_are_read_as_they_stand_there(tmp_path, name):
    """`datasets` alone would make 7 of 007, null of NA, and '"8"' of a text in a column with numbers."""
    content, expected = TEXTS[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).write_text(content)
    rows = list(read_rows(tmp_path / "folder"))
    assert [(row["prompt"], row["answer"]) for _, row in rows] == expected
    assert name in rows[0][0]


def test_a_wrong_text_in_a_folder_is_refused_with_its_file_and_line(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a", "prompt": "b"}\n')
    with pytest.raises(ConfigurationError, match="train.jsonl, line 2: the key 'prompt' is there 2 times"):
        list(read_rows(tmp_path / "folder"))


@pytest.mark.parametrize(
    ("name", "is_named"), [("b.csv", True), ("notes.md", False), ("dataset_info.json", False)]
)
def test_a_file_of_rows_that_is_left_out_is_named(tmp_path, caplog, name, is_named):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "folder" / name).write_text("prompt\nb\n" if is_named else "{}")
    assert [row["prompt"] for _, row in read_rows(tmp_path / "folder")] == ["a"]
    assert (f"{name} is not read" in caplog.text) == is_named


class Json:
    """Stands for the feature of `datasets` with this name."""


class List:
    def __init__(self, feature):
        self.feature = feature


@pytest.mark.parametrize(
    ("value", "feature", "expected"),
    [
        ('"a"', Json(), "a"),
        ("3", Json(), 3),
        (None, Json(), None),
        (['{"x": 1}'], List(Json()), [{"x": 1}]),
        (
            {"content": '"a"', "role": '"b"'},
            {"content": Json(), "role": "string"},
            {"content": "a", "role": '"b"'},
        ),
        ([{"content": '["a"]'}], [{"content": Json()}], [{"content": ["a"]}]),
        ('"a"', "string", '"a"'),
        (["3"], List("string"), ["3"]),
        ({"a": "3"}, None, {"a": "3"}),
        (3, Json(), 3),
    ],
)
def test_values_of_several_types_are_read_from_their_json(value, feature, expected):
    assert _with_json(value, feature) == expected
