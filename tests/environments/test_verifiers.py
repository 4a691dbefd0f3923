"""Environments of the package verifiers, the real one in its own interpreter, and what a trajectory of each comes to."""

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from chat_templates import MODEL
from scripted_play import SETTINGS, OneSession

from async_grpo.environments.config import EnvironmentConfig
from async_grpo.environments.make import make_played, rows_of, source_of
from async_grpo.errors import ConfigurationError
from async_grpo.types import Completion, Prompt

PYTHON = Path(sys.prefix, "verifiers", "bin", "python")
pytestmark = [
    pytest.mark.skipif(
        not PYTHON.exists() and not os.environ.get("REQUIRE_EXTRAS"),
        reason="verifiers is not there: scripts/setup_extras",
    ),
]
MODULE = '''
import asyncio
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str
    kind: str = ""

class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        print("this is no answer of ours")
        if self.data.kind == "raises":
            raise ValueError("the sums are lost \\ud83d")  # no character: it ends none beside it
        if self.data.kind == "slow":
            await asyncio.sleep(60)
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return len(trace.last_reply) < 5

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns

class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def add(self, a: int, b: int) -> int:
        """a + b"""
        return a + b

class Config(vf.TasksetConfig):
    first: int = 3

class Sums(vf.Taskset[Task, Config]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.SharedToolsetConfig())]

    def load(self):
        yield Task(Data(prompt=f"{self.config.first}+4?", system_prompt="be brief", answer="7"), self.config.task)
        yield Task(Data(prompt="which number?", answer="9", kind="guess"), self.config.task)
        yield Task(Data(prompt="1+1?", answer="2", kind="raises"), self.config.task)
        yield Task(Data(prompt="1+2?", answer="3", kind="slow", timeout=vf.TaskTimeout(scoring=0.2)), self.config.task)

class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Guess(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        if task.data.kind != "guess":
            return await agents.player.run(task)
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and task.data.answer not in said.last_reply:
                said = await talk.turn("higher")

__all__ = ["Sums", "Guess"]
if __name__ == "__main__":
    Adder.run()
'''
TOOL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
ADD = TOOL % ("adder_add", '{"a": 3, "b": 4}')
SAID = {  # by the tasks' places
    "tool": (0, [ADD, TOOL % ("nothing", "{}"), TOOL % ("adder_add", "[1]"), "it is 7"]),
    "wrong": (0, ["it is 8"]),
    "turns": (1, ["1", "5", "9"]),
    "raises": (2, ["2"]),
    "slow": (3, ["3"]),
    "endless": (0, [ADD] * 9),
    "another": (0, ["7"]),
}


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory):
    path = tmp_path_factory.mktemp("verifiers")
    (path / "little_sums.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(path))
        patch.setenv("HOME", str(path))
        yield


def config_of(name: str = "little_sums", options: str = "") -> EnvironmentConfig:
    options = ",".join(filter(None, [f"python={PYTHON}", options]))
    return EnvironmentConfig(
        environment=f"verifiers:{name}", environment_options=options, max_turns=6, tool_parser="hermes"
    )


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return rows_of(config_of(), "train")


@pytest.fixture(scope="module")
def played(rows) -> dict[str, Completion]:
    """What one process of verifiers made of all of SAID at once."""

    left = [iter(texts) for _, texts in SAID.values()]

    class Says(OneSession):
        """By the prompt's ordinal."""

        async def generate(self, prompt, *args, **options):
            self._says = lambda: next(left[prompt.ordinal])
            async for one in super().generate(prompt, *args, **options):
                yield one

    playing = make_played(config_of(), str(MODEL), SETTINGS, source_of("verifiers:little_sums"), Says())

    async def story():
        before = set(psutil.Process().children(recursive=True))
        await playing.start()

        async def one(number: int, name: str) -> Completion:
            row = rows[SAID[name][0]] | ({"hash": "0"} if name == "another" else {})
            (found,) = [one async for one in playing.generate(Prompt(number, np.empty(0, np.int32), row), 1)]
            return found

        found = await asyncio.gather(*(one(number, name) for number, name in enumerate(SAID)))
        assert len(set(psutil.Process().children(recursive=True)) - before) >= 1
        await playing.close()
        assert set(psutil.Process().children(recursive=True)) <= before
        return dict(zip(SAID, found, strict=True))

    return asyncio.run(asyncio.wait_for(story(), 150))


def test_the_tasks_of_an_environment_are_rows(rows):
    assert [(row["input"], row["answer"], row["task"]) for row in rows] == [
        ("3+4?", "7", 0),
        ("which number?", "9", 1),
        ("1+1?", "2", 2),
        ("1+2?", "3", 3),
    ]


def test_a_task_with_a_tool_is_played_recorded_and_scored_by_the_environment(played):
    one = played["tool"]
    assert one.outcome.reward == 1.0 and not one.truncated and not one.outcome.failure
    assert {"right": 1.0, "short": 0.0, "turns": 4.0}.items() <= one.outcome.numbers.items()
    assert [turn.text.removesuffix("<|im_end|>") for turn in one.turns] == SAID["tool"][1]
    assert "system\nbe brief<" in one.turns[0].before_text and "user\n3+4?<" in one.turns[0].before_text
    assert "tool\n7<" in one.turns[1].before_text
    assert "tool\nerror: KeyError: 'nothing'<" in one.turns[2].before_text
    assert "tool\nerror: TypeError" in one.turns[3].before_text
    assert not any(turn.fresh for turn in one.turns[1:])
    assert played["wrong"].outcome.reward == 0.0 and not played["wrong"].outcome.failure


def test_an_environment_that_answers_has_several_turns(played):
    one = played["turns"]
    assert one.outcome.reward == 1.5 and one.outcome.numbers["turns"] == 3
    assert [turn.before_text.count("higher") for turn in one.turns] == [0, 1, 1]
    assert not any(turn.fresh for turn in one.turns[1:])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "TaskError: task Task scoring: ValueError: the sums are lost ?"),
        ("slow", "it has not been scored (scoring_timeout)"),
        ("another", "makes different tasks each time it is loaded"),
    ],
)
def test_a_failing_task_is_a_failure_and_no_reward_of_0(played, name, said):
    assert said in played[name].outcome.failure and played[name].outcome.reward is None


def test_a_trajectory_at_its_limit_is_scored_as_far_as_it_came(played):
    one = played["endless"]
    assert one.outcome.numbers["right"] == 0.0 and not one.outcome.failure
    assert len(one.turns) == 6 and one.truncated


@pytest.mark.parametrize(
    ("name", "options", "split", "said"),
    [
        ("little_product", "", "train", "No module named 'little_product'.* -m pip install its package"),
        # Each takes 4 s of the processor
        pytest.param(
            "little_sums", "taskset.frist=3", "train", "taskset.frist", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "little_sums", "", "eval", "which tasks are for evaluation\\?", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(name, options, split, said):
    with pytest.raises(ConfigurationError, match=f"--environment verifiers:{name}: .*{said}") as refused:
        rows_of(config_of(name, options), split)
    assert "\n" not in str(refused.value)


def test_an_interpreter_without_verifiers_is_refused_with_the_way_out():
    config = EnvironmentConfig(environment="verifiers:x", environment_options=f"python={sys.executable}")
    with pytest.raises(ConfigurationError, match="No module named 'verifiers'.*python=PATH names"):
        rows_of(config, "train")


def test_options_are_those_of_the_split_and_choose_tasks():
    options = "taskset.first=1,select.skip=1,eval.taskset.first=2,eval.select.limit=1,eval.select.skip=0"
    (row,) = rows_of(config_of(options=options), "eval")
    assert row["input"] == "2+4?" and row["split"] == "eval"


def test_when_the_program_that_plays_dies_its_trajectories_have_failed_and_say_what_it_said(rows):
    playing = make_played(config_of("nothing"), str(MODEL), SETTINGS, None, OneSession(lambda: "7"))

    async def story():
        await playing.start()
        prompts = [Prompt(number, np.empty(0, np.int32), rows[0]) for number in range(2)]
        found = [one async for one in playing.generate(prompts[0], 1)]
        found += [one async for one in playing.generate(prompts[1], 1)]  # also those that come later
        await playing.close()
        return found

    for one in asyncio.run(asyncio.wait_for(story(), 60)):
        assert "ended with exit status 1" in one.outcome.failure and "'nothing'" in one.outcome.failure
