"""`async_grpo.train`: what a Python program gives becomes files and options that a run reads; its rewards run elsewhere."""

import asyncio
import functools
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from early_starts import nothing_early

import async_grpo
from async_grpo.data import COUNTDOWN_HELDOUT, COUNTDOWN_TRAIN, TINY_MODEL
from async_grpo.errors import ConfigurationError, RunInterrupted
from async_grpo.experience.data_config import DataConfig
from async_grpo.experience.data_files import read_rows
from async_grpo.experience.dataset import questions_of
from async_grpo.launch import from_python, local_run
from async_grpo.launch.from_python import TrainResult, train
from async_grpo.launch.python_rewards import reward_names
from async_grpo.launch.python_rows import row_file
from async_grpo.metrics.writer import METRICS_FILE, claim, release
from async_grpo.rewards.adapter.decorators import batch
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource, display_name
from async_grpo.rewards.adapter.trl_signature import trl_reward
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.types import RewardStatus

ROWS = [{"prompt": "3 + 4 = ?", "answer": 7}, {"prompt": "1 + 1 = ?", "answer": 2}]
LOCK = threading.Lock()  # cannot be pickled
MESSAGES = [{"role": "user", "content": "3 + 4 = ?"}]
SMALL = {"batch_size": 2, "samples_per_question": 2, "max_generation_tokens": 8, "num_training_batches": 1}


@pytest.fixture
def runs(monkeypatch):
    """The configurations of the runs that `train` would start."""
    started = []
    monkeypatch.setattr(from_python, "run_locally", started.append)
    return started


def written(file: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


# The data set


class HubDataset:
    """Yields its rows as `datasets.Dataset` does: columns that a row does not have are None."""

    def __init__(self, rows: list[dict]) -> None:
        columns = {column for row in rows for column in row}
        self.rows = [dict.fromkeys(columns) | row for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict:
        return self.rows[place]


@pytest.mark.parametrize(
    "made", [list, iter, HubDataset], ids=["list", "iterator", "like a Dataset of the hub"]
)
def test_rows_become_a_file_that_the_run_reads(tmp_path, made):
    from transformers import AutoTokenizer

    rows = [*ROWS, {"prompt": MESSAGES, "answer": 7}, {"messages": MESSAGES}, {"input": "5 = "}]
    file = row_file(made(rows), tmp_path, "dataset")
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    questions = questions_of(read_rows(file.path), tokenizer, 100, len(tokenizer))
    assert [question.row.get("answer") for question in questions] == [7, 2, 7, None, None]
    as_text, _, as_prompt, as_messages, _ = (tokenizer.decode(question.token_ids) for question in questions)
    assert as_prompt == as_messages and as_prompt.startswith("<|im_start|>user") and as_text == "3 + 4 = ?"


def test_columns_are_those_of_every_row_and_keep_their_values(tmp_path):
    rows = [
        {"prompt": "a", "nums": np.array([1, 2]), "level": np.int64(3)},
        {"prompt": "b", "nums": (3,), "x": {"y": 1}},
    ]
    file = row_file(rows, tmp_path, "dataset")
    assert written(file.path) == [
        {"prompt": "a", "nums": [1, 2], "level": 3},
        {"prompt": "b", "nums": [3], "x": {"y": 1}},
    ]
    assert file.columns == {"prompt", "nums"}


def test_a_file_is_private_and_named_by_its_content(tmp_path):
    first, again = row_file(ROWS, tmp_path, "dataset"), row_file(ROWS, tmp_path, "dataset")
    other = row_file(ROWS[:1], tmp_path, "dataset")
    assert first.path == again.path != other.path and Path(first.path).exists()
    assert os.stat(first.path).st_mode & 0o777 == 0o600
    assert hashlib.sha256(Path(first.path).read_bytes()).hexdigest()[:12] in first.path
    assert sorted(tmp_path.iterdir()) == sorted([Path(first.path), Path(other.path)])


def test_a_path_is_taken_as_it_is(tmp_path):
    assert row_file(COUNTDOWN_TRAIN, tmp_path, "dataset").path == str(COUNTDOWN_TRAIN)
    assert row_file("environment", tmp_path, "dataset").path == "environment"
    assert list(tmp_path.iterdir()) == []


class Frame:
    columns = ("prompt",)

    def to_dict(self, orient: str) -> list[dict]:
        return []


@pytest.mark.parametrize(
    ("dataset", "reason", "way_out"),
    [
        ([], "dataset holds no rows", ""),
        ([ROWS[0], "3 + 4"], "dataset, row 1 is a str, not a dict", '{"prompt": '),
        (
            [{"question": "3?", "answer": 3}],
            "row 0 has no prompt: its columns are question, answer",
            "Name the question",
        ),
        ([{"prompt": 3}], "row 0: prompt must be a text or a list of messages", "not 3"),
        ([{"prompt": []}], "row 0: prompt must be a text or a list of messages", '"role": "user"'),
        ([{"messages": "3?"}], "row 0: messages must be a list of messages", "not '3\\?'"),
        ([{"input": MESSAGES}], "row 0: input must be a text", "not "),
        (
            [ROWS[0], {"prompt": "a", "image": b"x"}],
            "row 1: the column image cannot be written as JSON .a bytes",
            "leave",
        ),
        (
            [{"prompt": "a", "x": float("nan")}],
            "row 0: the column x cannot be written as JSON",
            "finite numbers",
        ),
        ({"train": ROWS, "test": ROWS}, "dataset is a dict of train, test", "one of its splits"),
        (Frame(), "dataset is a Frame", r'dataset.to_dict\("records"\)'),
        (7, "dataset is a int", "list of dicts"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_with_the_way_out(tmp_path, dataset, reason, way_out):
    with pytest.raises(ConfigurationError, match=f"{reason}.*{way_out}"):
        row_file(dataset, tmp_path, "dataset")
    assert list(tmp_path.iterdir()) == []


# The rewards


def scores(names: str, samples: list[dict]) -> list[list]:
    """What the processes of the rewards say of the samples: a reward, or the reason why there is none."""

    async def score() -> list[list]:
        source = RewardRegistrySource.from_file(
            Path(async_grpo.__file__).parent / "data" / "reward_registry.py"
        )
        source = source.with_files(names)
        results = []
        for name in names.split(","):
            worker = AdapterProcess(source, display_name(name))
            try:
                answers = [await worker.score(sample, 30.0) for sample in samples]
            finally:
                await worker.close()
            results.append(
                [
                    a.reward if a.status is RewardStatus.OK else f"{a.status.value}: {a.reason}"
                    for a in answers
                ]
            )
        return results

    return asyncio.run(score())


def sample(completion: str, **columns) -> dict:
    prompt = columns.get("prompt", "3?")
    text = prompt if isinstance(prompt, str) else "<user>3?"
    return {
        "prompt": prompt,
        "input": text,
        "sample_text": text + completion,
        "truncated": False,
        "group_id": 0,
    } | {
        "completion": completion,
        "completion_token_ids": list(range(len(completion))),
        **columns,
    }


def maker(weight: float):
    def closure(sample):
        return weight * len(sample["completion"])

    return closure


class Counter:
    def __call__(self, sample):
        return {"reward": 1.0, "length": len(sample["completion"])}


def right(completions, answer, **columns):
    return [float(str(number) in text) for text, number in zip(completions, answer, strict=True)]


def test_functions_closures_and_lambdas_are_scored_in_processes_of_their_own(tmp_path):
    here = os.getpid()
    rewards = [
        maker(2.0),
        maker(3.0),
        lambda sample: os.getpid() - here,
        "countdown",
        functools.partial(pow, 2),
        Counter(),
    ]
    names = reward_names(rewards, tmp_path, None)
    assert [name.rpartition(":")[2] for name in names.split(",")] == [
        *("closure", "closure_2", "reward_3"),
        *("countdown", "pow", "Counter"),
    ]
    without_pow = ",".join(name for name in names.split(",") if "pow" not in name and name != "countdown")
    twice, thrice, (elsewhere,), (counted,) = scores(without_pow, [sample("abc")])
    assert (twice, thrice, counted) == ([6.0], [9.0], 1.0) and elsewhere != 0


def test_a_reward_with_the_signature_of_trl_gets_lists_and_columns(tmp_path):
    seen = [sample("It is 7.", answer=7), sample("It is 8.", answer=7)]
    names = reward_names([right, lambda completions, **kwargs: [None]], tmp_path, {"prompt", "answer"})
    assert scores(names, seen) == [[1.0, 0.0], ["abstained: the reward is None"] * 2]


def test_a_conversation_is_given_as_messages_where_the_column_is_named_as_in_trl(tmp_path):
    def form(prompts, completions, completion_ids, **columns):
        is_conversation = prompts == [MESSAGES] and completions == [[{"role": "assistant", "content": "abc"}]]
        is_text = isinstance(prompts[0], str) and completions == ["abc"]
        return [1.0 * is_conversation + 2.0 * is_text + len(completion_ids[0])]

    names = reward_names(form, tmp_path, None)
    beside = sample("abc", messages=MESSAGES)  # as the shipped countdown rows have it beside their text
    assert scores(names, [sample("abc", prompt=MESSAGES), sample("abc"), beside]) == [[4.0, 5.0, 5.0]]


def test_an_async_reward_and_a_batch_with_the_signature_of_trl_are_what_they_say(tmp_path):
    async def slow(completions, **columns):
        await asyncio.sleep(0)
        return [len(text) for text in completions]

    @batch(max_samples=8)
    def together(completions, answer):
        return np.array([len(completions) * number for number in answer])

    assert scores(reward_names(slow, tmp_path, None), [sample("abc")]) == [[3.0]]
    assert trl_reward(together)([sample("a", answer=1), sample("b", answer=2)]) == [2, 4]
    assert trl_reward(together).batching == together.batching


@pytest.mark.parametrize("returned", [1.0, [1.0, 2.0], None])
def test_a_wrong_answer_of_a_reward_of_trl_is_a_failure_and_no_number(tmp_path, returned):
    ((answer,),) = scores(
        reward_names(lambda completions, **columns: returned, tmp_path, None), [sample("a")]
    )
    assert "failed" in answer and "must return a list with a number for each of the 1 completions" in answer


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (7, "the reward 7 is a int: give a name of the registry"),
        (lambda completions, solution: [0.0], "needs solution, which is no column of every row: .* answer, prompt"),
        (lambda completions, trainer_state: [0.0], "needs trainer_state, which is no column"),
        (lambda sample, lock=LOCK: 0.0, "cannot be sent to its processes: TypeError.*lock"),
        (type("Judge", (), {"__call__": lambda self, completions: [0.0]}), r"give an object of it, Judge\(\)"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_be_used_is_refused_with_the_way_out(tmp_path, reward, reason):
    with pytest.raises(ConfigurationError, match=reason):
        reward_names(reward, tmp_path, {"prompt", "answer"})


def test_the_file_of_rewards_is_private_and_a_changed_pickle_is_not_loaded(tmp_path):
    name = reward_names(maker(1.0), tmp_path, None)
    file = Path(name.rpartition(":")[0])
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    line = next(line for line in text.splitlines() if line.startswith('    "'))
    other = Path(reward_names(lambda sample: os.abort(), tmp_path, None).rpartition(":")[0]).read_text()
    foreign = next(line for line in other.splitlines() if line.startswith('    "'))
    file.write_text(text.replace(line, foreign))
    with pytest.raises(
        ConfigurationError, match="a pickled reward is not the one that async_grpo.train has written"
    ):
        RewardRegistrySource("r", "REWARD_ADAPTERS = {}").with_files(name).files[0].object()


def test_a_reward_that_holds_a_secret_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", key := "sk-0123456789abcdef")
    with pytest.raises(
        ConfigurationError, match='holds the value of the environment variable MY_API_KEY.*reward_env="MY'
    ):
        reward_names(lambda sample: key, tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_function_of_a_module_beside_the_program_needs_no_path(tmp_path):
    program = tmp_path / "program"
    program.mkdir()
    (program / "helpers.py").write_text("def length(text):\n    return len(text)\n")
    (program / "own_rewards.py").write_text(
        "import helpers\n\ndef by_length(sample):\n    return helpers.length(sample['completion'])\n"
    )
    (program / "main.py").write_text(
        "from pathlib import Path\nimport own_rewards\nfrom async_grpo.launch.python_rewards import reward_names\n"
        f"print(reward_names(own_rewards.by_length, Path({str(tmp_path)!r}), None))\n"
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, program / "main.py"], capture_output=True, text=True, timeout=60, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert scores(done.stdout.strip(), [sample("abc")]) == [[3.0]]


# The options


def test_everything_that_is_given_reaches_the_run(tmp_path, runs):
    train(
        TINY_MODEL,
        ROWS,
        [right, "math_verify"],
        eval_dataset={"small": ROWS, "countdown": COUNTDOWN_HELDOUT},
        output_dir=tmp_path / "run",
        reward_weights={"right": 0.5},
        reward_combine="sum",
        learning_rate=1,
        batch_size=np.int64(2),
        enforce_eager=True,
        ray_address="10.0.0.1:6379",
        max_hours=None,
        recipe="dr_grpo",
        clip_low=0.1,
    )
    (config,) = runs
    assert config.model_name_or_path == str(TINY_MODEL) and config.output_dir == str(tmp_path / "run")
    assert written(config.data_path) == ROWS and list(config.eval_files) == ["small", "countdown"]
    assert config.reward_fns == f"{tmp_path}/run/from_python/train_rewards.py:right,math_verify"
    assert (
        config.weights_by_name == {"right": 0.5}
        and config.enforce_eager
        and config.ray_address == "10.0.0.1:6379"
    )
    assert (
        config.learning_rate == 1.0 and type(config.learning_rate) is float and type(config.batch_size) is int
    )
    assert (
        config.advantage_estimator == "dr_grpo" and config.clip_low == 0.1
    )  # the recipe's, and the caller's
    assert (tmp_path / "run" / "from_python").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lerning_rate": 1e-6}, "lerning_rate is no option; did you mean learning_rate"),
        ({"data_path": "x"}, "data_path is given as the argument dataset"),
        ({"batch_size": "many"}, "--batch-size 'many': a whole number is needed"),
        ({"batch_size": 2.5}, "--batch-size 2.5: a whole number is needed"),
        ({"batch_size": True}, "--batch-size True: a whole number is needed"),
        ({"batch_size": None}, "--batch-size None: a whole number is needed"),
        ({"learning_rate": [1]}, r"--learning-rate \[1\]: a number is needed"),
        ({"enforce_eager": "yes"}, "--enforce-eager 'yes': True or False is needed"),
        ({"run_name": 3}, "--run-name 3: a text, a list or a dict is needed"),
        ({"batch_size": 0}, "--batch-size must be above 0, not 0"),
        ({"policy_loss": "ppo"}, "--policy-loss 'ppo' is unknown; known: "),
        ({"logging_level": "LOUD"}, "--logging-level 'LOUD': use DEBUG"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_written(tmp_path, runs, options, reason):
    with pytest.raises(ConfigurationError, match=reason):
        train(TINY_MODEL, ROWS, "countdown", output_dir=tmp_path / "run", **options)
    assert runs == [] and list(tmp_path.iterdir()) == []


def test_the_checks_of_the_command_are_made_and_say_the_same(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match="unknown reward function countdwn.*did you mean countdown"):
        train(TINY_MODEL, ROWS, "countdwn", output_dir=tmp_path / "run", **SMALL)
    monkeypatch.setattr(local_run, "early_start", nothing_early)
    with pytest.raises(ConfigurationError, match="'/no/model' is not a folder"):
        train("/no/model", ROWS, "countdown", output_dir=tmp_path / "run", **SMALL)
    with pytest.raises(ConfigurationError, match="name the rewards of the run"):
        train(TINY_MODEL, ROWS, output_dir=tmp_path / "run", **SMALL)
    with pytest.raises(ConfigurationError, match="model is a dict, not the path.*save_pretrained"):
        train({}, ROWS, "countdown", output_dir=tmp_path / "run", **SMALL)


def test_a_dry_run_works_in_a_notebook_whose_event_loop_runs(tmp_path, capsys):
    async def cell() -> TrainResult:
        return train(TINY_MODEL, ROWS, [right], output_dir=tmp_path / "run", dry_run=True, **SMALL)

    result = asyncio.run(cell())
    assert "1 of 4 samples" in capsys.readouterr().out
    assert result.metrics == [] and result.model is None


def test_a_dry_run_works_in_another_thread_than_the_main_one(tmp_path):
    results = []
    options = {"output_dir": tmp_path / "run", "dry_run": True, **SMALL}
    thread = threading.Thread(target=lambda: results.append(train(TINY_MODEL, ROWS, [right], **options)))
    thread.start()
    thread.join(60)
    assert len(results) == 1


# The program around the run


def test_the_folder_is_private_or_refused(tmp_path, runs):
    folder = tmp_path / "run" / "from_python"
    folder.mkdir(parents=True, mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(ConfigurationError, match="is not a folder that only you can enter: chmod 700"):
        train(TINY_MODEL, ROWS, "countdown", output_dir=tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.rmdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="is not a folder that only you can enter"):
        train(TINY_MODEL, ROWS, "countdown", output_dir=tmp_path / "run")
    with pytest.raises(ConfigurationError, match="choose a path without ="):
        train(TINY_MODEL, ROWS, "countdown", output_dir=tmp_path / "lr=1")


def test_a_folder_in_which_another_run_writes_keeps_its_files(tmp_path, runs):
    code = f"""
import sys
from pathlib import Path
from async_grpo.metrics.writer import claim
claim(Path({str(tmp_path / "run")!r}))
print("claimed", flush=True)
sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as other:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(ConfigurationError, match="another run .* is writing"):
            train(TINY_MODEL, ROWS, [right], output_dir=tmp_path / "run")
        assert not (tmp_path / "run" / "from_python").exists() and runs == []
        other.stdin.close()
        other.wait(10)


def test_after_the_run_another_process_may_go_on_in_the_folder(tmp_path, runs):
    train(TINY_MODEL, ROWS, [right], output_dir=tmp_path / "run")
    code = "import sys, pathlib, async_grpo.metrics.writer as w; w.claim(pathlib.Path(sys.argv[1]))"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], timeout=60).returncode == 0


def test_an_interrupt_is_a_keyboard_interrupt_also_when_the_run_has_saved(tmp_path, monkeypatch):
    def interrupted(config):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            saved = RunInterrupted("SIGINT: saved in here; the same command goes on from there")
            raise saved  # noqa: B904 (as `local_run` does)

    monkeypatch.setattr(from_python, "run_locally", interrupted)
    with pytest.raises(KeyboardInterrupt, match="saved in here"):
        train(TINY_MODEL, ROWS, [right], output_dir=tmp_path / "run")

    def over(config):
        raise RunInterrupted("--max-hours: saved in here")

    monkeypatch.setattr(from_python, "run_locally", over)
    with pytest.raises(RunInterrupted, match="max-hours"):
        train(TINY_MODEL, ROWS, [right], output_dir=tmp_path / "run")


def test_signals_and_the_programs_own_log_are_afterwards_what_they_were(tmp_path):
    log, numbers = (
        logging.getLogger("async_grpo"),
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1),
    )

    def state() -> tuple:
        handlers = [signal.getsignal(number) for number in numbers]
        return log.handlers, log.propagate, log.level, logging.getLogRecordFactory(), sys.excepthook, handlers

    before = state()
    train(TINY_MODEL, ROWS, [right], output_dir=tmp_path / "run", dry_run=True, **SMALL)
    assert state() == before


def test_what_a_run_has_left_is_read_and_drawn(tmp_path):
    lines = [
        {"step": step, "avg_reward": step / 10, "total_samples_accumulated": 8 * step} for step in (1, 2, 3)
    ]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in (
        "checkpoints/step_000000002",
        "checkpoints/step_000000003",
        "hf_format/samples_9",
        "hf_format/samples_24",
    ):
        (tmp_path / name).mkdir(parents=True)
    result = TrainResult.read(tmp_path)
    assert result.metrics == lines and result.model == tmp_path / "hf_format" / "samples_24"
    assert [path.name for path in result.checkpoints] == ["step_000000002", "step_000000003"]
    assert (
        result.plot() == tmp_path / "training.svg" and "avg_reward" in (tmp_path / "training.svg").read_text()
    )
    assert result.plot(tmp_path / "own.png", keys=["avg_reward"]).stat().st_size > 1000
    assert "avg_reward" not in repr(result)


def test_importing_the_name_imports_nothing_heavy():
    code = "import sys, async_grpo; dir(async_grpo); print({'torch', 'ray', 'cloudpickle', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_claim_can_be_given_back(tmp_path):
    claim(tmp_path)
    release(tmp_path)
    release(tmp_path)


COLUMNS = DataConfig(prompt_column="problem", answer_column="reward_model.ground_truth").column_map
VERL_ROW = {"problem": "3 + 4?", "reward_model": {"ground_truth": "7"}}


def test_rows_of_python_are_read_by_the_columns_that_the_options_name(tmp_path):
    rows = [VERL_ROW, {"problem": "1?", "reward_model": {"ground_truth": ["1"]}, "input": None}]
    file = row_file(rows, tmp_path, "dataset", COLUMNS)
    first, second = (row for _, row in read_rows(file.path, COLUMNS))
    assert first["messages"] == [{"role": "user", "content": "3 + 4?"}] and first["answer"] == "7"
    assert second["answer"] == ["1"] and "input" not in second
    assert {"messages", "answer"} <= file.columns


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"reward_model": {"ground_truth": "7"}}, "problem is not in this row"),
        ({"problem": None, "reward_model": {"ground_truth": "7"}}, "problem is null in this row"),
        ({"problem": "a", "reward_model": {}}, "reward_model.ground_truth is not in this row"),
        ({"problem": 7, "reward_model": {"ground_truth": "7"}}, "a prompt must be a text"),
    ],
)
def test_a_row_of_python_without_the_named_columns_is_refused_by_number(tmp_path, row, message):
    with pytest.raises(ConfigurationError, match=f"dataset, row 1: .*{message}"):
        row_file([VERL_ROW, row], tmp_path, "dataset", COLUMNS)
    assert list(tmp_path.iterdir()) == []
