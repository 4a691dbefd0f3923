"""Files of options as people write them: other formats, encodings of Windows, lists and tables, names with commas."""

import errno
import os
from pathlib import Path

import pytest

from async_grpo.config.evaluation_files import refuse_ambiguous_files
from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError, RunFailed
from async_grpo.launch.commands import foreign_keys
from async_grpo.launch.evaluate import EvalConfig
from async_grpo.launch.local_config import LocalConfig
from async_grpo.options.command_line import run_command
from async_grpo.options.option_file import read_options
from async_grpo.rewards.adapter.registry_source import parse_names

NEEDED = 'model_name_or_path = "m"\ndata_path = "d"\nreward_fns = ["countdown"]\n'


def file_of(folder: Path, content: str | bytes, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def run_with(*argv: object, config_class: type = LocalConfig):
    """The configuration of a command line, or None if it is refused."""
    seen = []
    with pytest.raises(SystemExit):
        run_command(config_class, seen.append, help="", argv=list(map(str, argv)), foreign=foreign_keys)
    return seen[0] if seen else None


def options_of(folder: Path, content: str | bytes, name: str = "run.toml"):
    return read_options(file_of(folder, content, name), RunConfig, foreign_keys)


UNREADABLE = [  # name, content, reason, way out
    ("run.yaml", "batch_size: 16\nlearning_rate: 1e-6\n", "looks like YAML", "write batch_size = 16"),
    ("run.yml", "run_name: first try # today\n", "looks like YAML", 'write run_name = "first try"'),
    ("run.toml", "batch_size: 16\n", "looks like YAML", "write batch_size = 16"),
    ("run.toml", 'run_name = "a"\n\nmask-truncated: True\n', "looks like YAML", "write mask_truncated = true"),
    ("run.toml", "---\nbatch_size: 16\n", "looks like YAML", "read from TOML"),
    ("run.toml", "- batch_size: 16\n", "looks like YAML", "texts in quotes"),
    ("run.toml", "training:\n  learning_rate: 1e-6\n", "looks like YAML", "write training = VALUE"),
    ("run.toml", '{"batch_size": 16}\n', "looks like JSON", "ending .json"),
    ("run.toml", "--batch-size 16\n", "an option of a command line", "write batch_size = 16"),
    ("run.toml", "--batch-size=16 --seed=1\n", "an option of a command line", "write batch_size"),
    ("run.toml", "batch_size = 16\noutput_dir = runs/a\n", "line 2", 'write output_dir = "runs/a"'),
    ("run.toml", "mask_truncated = True\n", "line 1", "write mask_truncated = true"),
    ("run.toml", "mask_truncated = no\n", "line 1", "write mask_truncated = false"),
    ("run.toml", "batch_size = 16,\n", "line 1", "write batch_size = 16, and texts"),
    ("run.toml", "run_name = 007\n", "line 1", 'write run_name = "007"'),
    ("run.toml", 'data_path = "C:\\Users\\x"\n', "line 1", "write data_path = 'C:\\Users\\x'"),
    ("run.toml", "max_generation_tokens = None\n", "line 1", "leave the option out"),
    ("run.yaml", "max_generation_tokens: null\n", "looks like YAML", "leave the option out"),
    ("run.json", '{"batch_size": 16, "batch_size": 8}', "the key 'batch_size' is there 2 times", "keep one"),
    ("run.toml", "batch_size = \n", "cannot be read", "line 1"),
    ("run.toml", "batch_size = 16\nbatch_size = 8\n", "overwrite", "given twice: remove one of them"),
    ("run.toml", "[experience]\n[experience]\n", "Cannot declare", "given twice: remove one of them"),
    ("run.toml", b"batch_size = 16\rseed = 1\r", "a line ends with CR alone", "by tr "),
    ("run.toml", "batch_size = 16\n".encode("utf-16"), "UTF-16", "save it as UTF-8"),
    ("run.toml", 'run_name = "é"\n'.encode("cp1252"), "it is not UTF-8", "save it as UTF-8"),
    ("run.json", "batch_size = 16\n", "run.json cannot be read", "run.json"),
    ("run.toml", "[1, 2]\nx", "cannot be read", "line 1"),
]  # fmt: skip
READABLE = [  # name, content
    ("run.toml", "\ufeffbatch_size = 16\n"),
    ("run.toml", "\ufeff# options\r\nbatch_size = 16\r\n"),
    ("run.json", '\ufeff{"batch_size": 16}'),
    ("run.toml", "\ufeff[experience]\nbatch_size = 16\n"),
    ("run.toml", 'run_name = "a: b"\nbatch_size = 16\n'),
    ("run.toml", "# batch_size: 8\nbatch_size = 16\n"),
    ("run.toml", "# --batch-size 8\nbatch_size = 1_6\n"),
    ("run.toml", "batch-size = 16\n"),
    ("run.toml", "run_name = '007'\nbatch_size = 16\n"),
    ("run.toml", "output_dir = 'C:\\Users\\x'\nbatch_size = 16\n"),
    ("run.json", '{"batch_size": 16, "reward_weights": {"a": 1}, "reward_options": {"a": 1}}'),
    ("run.yaml.toml", "batch_size = 16\n"),
    ("run.yaml", "batch_size = 16\n"),  # TOML under another name
    ("run.toml", 'run_name = """\n- a\n---\n"""\nbatch_size = 16\n'),
    ("run.json", '{"batch_size": 16, "seed": null}'),
]


@pytest.mark.parametrize(("name", "content", "reason", "way_out"), UNREADABLE)
def test_a_file_that_is_no_toml_is_refused_with_the_line_and_how_to_write_it(
    tmp_path, capsys, name, content, reason, way_out
):
    path = file_of(tmp_path, content, name)
    assert run_with(path) is None
    error = capsys.readouterr().err
    assert f"--config {path} cannot be read" in error and reason in error and way_out in error, error


@pytest.mark.parametrize(("name", "content"), READABLE)
def test_a_file_that_only_looks_strange_is_read(tmp_path, name, content):
    assert options_of(tmp_path, content, name)["batch_size"] == "16"


WRONG_FORMS = [
    ("run_name = []", "run_name is a list, and a single value is needed, not []"),
    ('run_name = ["a"]', "run_name is a list"),
    ("batch_size = [16]", "batch_size is a list, and a single value is needed, not [16]"),
    ("batch_size = {}", "batch_size is a table, and a single value is needed, not {}"),
    ("learning_rate = [1e-6, 2e-6]", "learning_rate is a list"),
    ("[output_dir]\na = 1", "output_dir is a table"),
    ('data_path = ["a.jsonl", "b.jsonl"]', "data_path is a list"),
    ("mask_truncated = [true]", "mask_truncated is a list"),
    ('eval_data_path = ["a.jsonl"]', "eval_data_path is a list, and a table is needed"),
    ("reward_fns = {countdown = 1}", "reward_fns is a table, and a list is needed"),
    ('reward_weights = ["a"]', "reward_weights is a list, and a table is needed"),
    ('reward_fns = [["countdown"]]', "reward_fns holds ['countdown'], and texts or numbers are needed"),
    ("reward_weights = {a = [1]}", "reward_weights holds [1]"),
    ("advantage_estimator = {}", "advantage_estimator is a table"),
]
RIGHT_FORMS = [
    ('run_name = "[]"', "run_name", "[]"),
    ("run_name = 5", "run_name", "5"),
    ("reward_fns = []", "reward_fns", ""),
    ('reward_fns = "a,b"', "reward_fns", "a,b"),
    ('reward_fns = ["a", "b.py:f"]', "reward_fns", "a,b.py:f"),
    ('track = ["tensorboard"]', "track", "tensorboard"),
    ("reward_weights = {a = 0.5, b = 2}", "reward_weights", "a=0.5,b=2"),
    ("[rewards.reward_weights]\na = 0.5", "reward_weights", "a=0.5"),
    ("[reward_limits]\njudge.rpm = 60\njudge.tpm = 9", "reward_limits", "judge.rpm=60,judge.tpm=9"),
    ('reward_limits = {"judge.rpm" = 60}', "reward_limits", "judge.rpm=60"),
    ("loss_options = {cap = 5, normalize = false}", "loss_options", "cap=5,normalize=False"),
    ('eval_data_path = {easy = "a.jsonl"}', "eval_data_path", "easy=a.jsonl"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FORMS)
def test_a_list_or_table_for_an_option_that_takes_none_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigurationError) as refused:
        options_of(tmp_path, text)
    assert f"run.toml: {message}" in str(refused.value)


@pytest.mark.parametrize(("text", "name", "value"), RIGHT_FORMS)
def test_lists_and_tables_of_options_that_take_them_are_read(tmp_path, text, name, value):
    assert options_of(tmp_path, text)[name] == value


MISPLACED = [  # of the worker, or of the files that a run writes
    ("[training]\nmode = 'generation'", "mode belongs in the table [config], not in [training]"),
    ("[rewards]\nmax_num_seqs = 8", "max_num_seqs belongs in the table [inference], not in [rewards]"),
    ("[experience]\nengine_options = {}", "engine_options belongs in the table [inference], not in [experience]"),
    ("[config]\nenforce_eager = true", "enforce_eager belongs in the table [inference], not in [config]"),
    ("[training]\ngeneration_workers = 2", "generation_workers belongs in the table [launch], not in [training]"),
    ("[inference]\nrole = 1\n[weights]\nnode = 'any'", "node belongs in the table [config], not in [weights]"),
    ("[rewards]\nWORLD_SIZE = 2", "WORLD_SIZE belongs in no table, not in [rewards]"),
]  # fmt: skip
WELL_PLACED = [
    "[config]\nmode = 'generation'",
    "[inference]\nmax_num_seqs = 8",
    "max_num_seqs = 8",
    "[launch]\ngeneration_workers = 2",
    "WORLD_SIZE = 2",
    "[inference]\nmax_tokens_per_gpu = 9",
    "[experience]\nmax_tokens_per_gpu = 9",
]


@pytest.mark.parametrize(("text", "message"), MISPLACED)
def test_an_option_of_another_program_in_a_wrong_table_is_refused_by_name(tmp_path, text, message):
    with pytest.raises(ConfigurationError) as refused:
        options_of(tmp_path, text)
    assert message in str(refused.value)


@pytest.mark.parametrize("text", WELL_PLACED)
def test_an_option_of_another_program_in_its_own_table_is_left_to_that_program(tmp_path, text):
    options_of(tmp_path, text)


TABLES_OF_FILES = [  # table in a TOML file
    {"easy": "held out, easy.jsonl"},
    {"easy": "a,b.jsonl", "hard": "c.jsonl"},
    {"easy": "lr=1,seed=2.jsonl"},
    {"easy": "lr=1.jsonl"},
    {"lr=1": "a.jsonl"},
    {"a,b": "a.jsonl"},
    {"held out": 'a "quoted" name.jsonl'},
    {"ü": "größe,1.jsonl"},
    {"easy": "{a}.jsonl"},
    {"easy": "C:\\data\\a,b.jsonl"},
    {"easy": "a.jsonl", "hard": "b.jsonl"},
]


@pytest.mark.parametrize("files", TABLES_OF_FILES)
@pytest.mark.parametrize("config_class", [LocalConfig, EvalConfig])
def test_a_table_takes_every_name_of_a_file_and_the_programs_of_the_run_read_it_again(
    tmp_path, files, config_class
):
    pairs = "\n".join(f"{name!r} = {file!r}" for name, file in files.items())
    text = "[eval_data_path]\n" + pairs.replace("\\\\", "\\")
    arguments = [file_of(tmp_path, NEEDED + text)]
    if config_class is EvalConfig:
        arguments = [tmp_path, f"--config={file_of(tmp_path, text)}"]
    config = run_with(*arguments, config_class=config_class)
    assert config.eval_files == files
    # A run hands the text on, on command lines and in its parameters
    again = run_with("--model-name-or-path=m", "--data-path=d", "--reward-fns=countdown",
                     "--eval-data-path", config.eval_data_path)  # fmt: skip
    assert again.eval_files == files


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["my, rewards.py:f"], ("my, rewards.py:f",)),
        (["a,b.py:f", "countdown"], ("a,b.py:f", "countdown")),
        (["a=b.py:f"], ("a=b.py:f",)),
        (["[a].py:f", "b"], ("[a].py:f", "b")),
        (["a", "a"], ("a",)),
    ],
)
def test_a_list_takes_every_name_of_a_file(tmp_path, names, read):
    text = options_of(tmp_path, f"reward_fns = {names}")["reward_fns"]
    assert parse_names(text) == read


@pytest.mark.parametrize(
    ("value", "files"),
    [
        ("a.jsonl", {"": "a.jsonl"}),
        ("a,b.jsonl", {"": "a,b.jsonl"}),
        ("easy=a.jsonl,hard=b.jsonl", {"easy": "a.jsonl", "hard": "b.jsonl"}),
        ("easy=lr=1.jsonl", {"easy": "lr=1.jsonl"}),
        ('{"easy": "a,b.jsonl"}', {"easy": "a,b.jsonl"}),
        ("easy = a b.jsonl , hard = c.jsonl", {"easy": "a b.jsonl", "hard": "c.jsonl"}),
    ],
)
def test_files_on_the_command_line(value, files):
    config = RunConfig(model_name_or_path="m", data_path="d", eval_data_path=value)
    assert config.eval_files == files


@pytest.mark.parametrize(
    "value",
    ["easy=a,b.jsonl", "a.jsonl,easy=b.jsonl", "easy=a.jsonl,easy=b.jsonl", "=a.jsonl", "easy=", '{"easy": [1]}', "{easy"],
)  # fmt: skip
def test_files_that_the_command_line_cannot_tell_apart_are_refused_with_the_way_out(value):
    with pytest.raises(ConfigurationError, match="eval-data-path") as refused:
        _ = RunConfig(model_name_or_path="m", data_path="d", eval_data_path=value).eval_files
    assert "comma" in str(refused.value) or "{" in value


@pytest.mark.parametrize("name", ["lr=1.jsonl", "lr=1,seed=2.jsonl", "=.jsonl", "a=b=c.jsonl"])
def test_a_file_whose_name_reads_as_an_assignment_is_named_with_the_way_out(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    config = RunConfig(model_name_or_path="m", data_path="d", eval_data_path=name)
    with pytest.raises(ConfigurationError, match="--eval-data-path") as refused:
        refuse_ambiguous_files(config)
    assert f"held_out={name}" in str(refused.value) or "give a file" in str(refused.value)
    right = {"held_out": name}
    path = file_of(tmp_path, f"[eval_data_path]\nheld_out = {name!r}")
    read = RunConfig(
        model_name_or_path="m",
        data_path="d",
        eval_data_path=read_options(path, RunConfig, dict)["eval_data_path"],
    )
    refuse_ambiguous_files(read)
    assert read.eval_files == right


@pytest.mark.parametrize(
    "value", [None, "a.jsonl", "a,b.jsonl", "lr=1.jsonl", "x=a.jsonl,y=1.jsonl", "none=none.jsonl"]
)
def test_files_that_can_be_told_apart_are_left_alone(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "a,b.jsonl", "1.jsonl"):
        Path(name).touch()
    refuse_ambiguous_files(RunConfig(model_name_or_path="m", data_path="d", eval_data_path=value))


def test_a_nul_character_in_an_option_is_refused_by_its_name(capsys, tmp_path):
    assert run_with(file_of(tmp_path, NEEDED + 'output_dir = "a\\u0000b"')) is None
    assert "--output-dir 'a\\x00b' holds a NUL character: remove it" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_an_empty_output_folder_is_refused(capsys, tmp_path, value):
    needed = ("--model-name-or-path=m", "--data-path=d", "--reward-fns=countdown")
    assert run_with(*needed, f"--output-dir={value}") is None
    assert "--output-dir is empty: name a folder" in capsys.readouterr().err
    assert run_with(file_of(tmp_path, NEEDED + f'output_dir = "{value}"')) is None
    assert run_with(*needed, "--output-dir=.").output_dir == "."


@pytest.mark.parametrize(
    ("number", "is_named"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EROFS, True),
        (errno.ENOENT, False),  # may be a mistake of the program, so that its traceback is needed
        (errno.EBADF, False),
    ],
)
def test_a_full_disk_is_an_error_of_one_line(capsys, number, is_named):
    def run(config):
        raise OSError(number, os.strerror(number), "out/metrics.jsonl")

    arguments = ["--model-name-or-path=m", "--data-path=d"]
    with pytest.raises(SystemExit if is_named else OSError) as ended:
        run_command(RunConfig, run, help="", argv=arguments)
    if is_named:
        assert ended.value.code == RunFailed.exit_code
        said = capsys.readouterr().err
        assert said.startswith(f"error: out/metrics.jsonl cannot be written: {os.strerror(number)}")
        assert "choose another place" in said and said.count("\n") == 1


def test_a_full_disk_under_the_console_is_one_too(capsys):
    def run(config):
        with Path("/dev/full").open("w") as console:
            console.write("x")

    with pytest.raises(SystemExit):
        run_command(RunConfig, run, help="", argv=["--model-name-or-path=m", "--data-path=d"])
    assert "the output cannot be written: No space left on device" in capsys.readouterr().err
