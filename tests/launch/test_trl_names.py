"""The first example of TRL's README, with another import, class name, model and data set, is a run of this library."""

import json
import re
import sys
import types
from pathlib import Path

import pytest

import async_grpo
from async_grpo import AsyncGRPOTrainer, accuracy_reward
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.launch import from_python
from async_grpo.rewards.adapter.trl_signature import trl_reward

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
ROWS = [
    {"prompt": [{"role": "user", "content": f"What is {n} + 4?"}], "solution": f"${n + 4}$"} for n in range(5)
]
# https://github.com/huggingface/trl, README.md
TRL_EXAMPLE = """from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")

trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=accuracy_reward,
    train_dataset=dataset,
)
trainer.train()
"""


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The configurations of the runs that would be started."""
    started = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(from_python, "run_locally", started.append)
    return started


def ours(example: str, rows_file: Path) -> str:
    """Change imports and class name, and take a local model and data set."""
    for theirs, replacement in (
        ("from trl import GRPOTrainer", "from async_grpo import AsyncGRPOTrainer"),
        ("from trl.rewards import", "from async_grpo import"),
        ("= GRPOTrainer(", "= AsyncGRPOTrainer("),
        ("Qwen/Qwen2.5-0.5B-Instruct", str(TINY_MODEL)),
        ('load_dataset("trl-lib/DeepMath-103K",', f'load_dataset("json", data_files="{rows_file}",'),
    ):
        assert example.count(theirs) == 1
        example = example.replace(theirs, replacement)
    return example


def test_the_example_is_a_run_with_the_defaults_of_trl(runs, tmp_path, monkeypatch):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    # `datasets` is no dependency; async_grpo.train takes whatever yields dicts
    datasets = types.ModuleType("datasets")
    datasets.load_dataset = lambda kind, data_files, split: [
        json.loads(line) for line in Path(data_files).read_text().splitlines()
    ]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    exec(compile(ours(TRL_EXAMPLE, file), "example", "exec"), {})
    (config,) = runs
    assert (config.samples_per_question, config.batch_size, config.max_generation_tokens) == (8, 1, 256)
    assert (config.num_training_batches, config.learning_rate, config.mask_truncated) == (15, 1e-6, False)
    rows = [json.loads(line) for line in Path(config.data_path).read_text().splitlines()]
    assert [row["solution"] for row in rows] == [row["solution"] for row in ROWS]
    assert config.reward_fns.endswith(":accuracy_reward")


def test_the_page_shows_the_same_example():
    (block,) = [
        text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Trainer(" in text
    ]
    same = [line for line in TRL_EXAMPLE.splitlines() if "trl" not in line and "Qwen" not in line]
    changed = {"trainer = GRPOTrainer(": "trainer = AsyncGRPOTrainer("}
    assert [changed.get(line, line) for line in same if line] == [
        line
        for line in block.splitlines()
        if line and "async_grpo" not in line and "Qwen" not in line and "deepmath" not in line
    ]


def test_the_reward_compares_with_the_solution():
    right, wrong, message = r"\boxed{7}", r"\boxed{8}", [{"role": "assistant", "content": r"\boxed{7}"}]
    results = accuracy_reward(completions=[right, wrong, message], solution=["$3 + 4$", "7", "7"])
    assert [result["reward"] for result in results] == [1.0, 0.0, 1.0]
    reward = trl_reward(accuracy_reward)
    sample = {"prompt": ROWS[3]["prompt"], "completion": right, "input": "", "solution": "$7$"}
    assert reward(sample)["reward"] == 1.0


def test_options_have_our_names_or_those_of_other_libraries_and_beat_the_defaults(runs):
    trainer = AsyncGRPOTrainer(
        str(TINY_MODEL),
        ["math_verify", accuracy_reward],
        {"num_generations": 4, "max_steps": 2},
        [{**row, "answer": row["solution"]} for row in ROWS],
        max_generation_tokens=16,
    )
    trainer.train()
    (config,) = runs
    assert (config.samples_per_question, config.num_training_batches) == (4, 2)
    assert (config.max_generation_tokens, config.reward_combine) == (16, "sum")


@pytest.mark.parametrize(("batch_size", "num_steps"), [(1, 15), (2, 8), (5, 3), (64, 1)])
def test_three_epochs_are_three_epochs_whatever_the_batch(runs, batch_size, num_steps):
    AsyncGRPOTrainer(str(TINY_MODEL), accuracy_reward, train_dataset=ROWS, batch_size=batch_size).train()
    assert runs[0].num_training_batches == num_steps


@pytest.mark.parametrize("batch_size", [0, -1, "many"])
def test_a_batch_that_cannot_be_is_refused_by_its_name(runs, batch_size):
    trainer = AsyncGRPOTrainer(str(TINY_MODEL), accuracy_reward, train_dataset=ROWS, batch_size=batch_size)
    with pytest.raises(ConfigurationError, match="batch.size"):
        trainer.train()


class GRPOConfig:
    """TRL's."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": GRPOConfig()}, "args is a GRPOConfig, whose options have other names here"),
        ({"args": {"batch_size": 2}, "batch_size": 3}, "batch_size is given twice"),
        ({"train_dataset": None}, "train_dataset is missing"),
    ],
)
def test_what_it_cannot_take_is_refused_with_the_way_out(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        AsyncGRPOTrainer(**{"model": str(TINY_MODEL), "train_dataset": ROWS} | arguments)


def test_an_option_of_trl_alone_is_refused(runs):
    trainer = async_grpo.AsyncGRPOTrainer(
        str(TINY_MODEL), accuracy_reward, train_dataset=ROWS, max_completion_length=16
    )
    with pytest.raises(ConfigurationError, match="max_completion_length is no option"):
        trainer.train()
