"""A pool without a trainer, a run or Ray: for a program of one's own, and as a reward function of TRL."""

import asyncio
import re
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.config import RewardConfig
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.isolation.child_process import ChildProcess
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import RewardStatus

ROOT = Path(__file__).resolve().parents[2]
RIGHT, WRONG = r"so \boxed{0.5}", r"so \boxed{2}"
MAX_CALLS, MAX_FILES = 14, 8  # the way of one verdict, the run's messages included
RUN_CALLS, RUN_FILES = 3, 2  # of these: slot, channel, and its other end, on the way to another node

REGISTRY = '''
import os, traceback
from async_grpo.rewards.adapter.decorators import post_process

def half(sample, weight=0.5):
    return weight

def fails(sample):
    return 1 / 0

def sees(sample):
    """The columns that it gets are what TRL's data set has."""
    assert sample["sample_text"] == sample["input"] + sample["completion"]
    return float(sample["completion"] == sample["answer"]) + sample["completion_token_ids"][0]

def key(sample):
    assert "OTHER_KEY" not in os.environ, "it was not asked for"
    return float(os.environ["MY_KEY"])

def way(sample):
    calls = [f"{os.path.basename(frame.filename)} {frame.name}" for frame in traceback.extract_stack()]
    raise ValueError(" > ".join(call for call in calls if not call.startswith("<")))

@post_process(lambda group: [float(len(group)) for _ in group])
def group_size(sample):
    return 0.0

REWARD_ADAPTERS = {name: value for name, value in list(globals().items()) if callable(value)}
'''


@pytest.fixture
def registry(tmp_path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(REGISTRY)
    return path


def test_the_example_of_a_pool_alone_runs_as_it_stands_in_the_docs():
    section = (ROOT / "docs" / "rewards.md").read_text().split("## Without a run\n")[1].split("\n## ")[0]
    alone, for_trl = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    trainer = f"""class GRPOTrainer:
    def __init__(self, reward_funcs, **_): self.reward = reward_funcs
    def train(self): print(self.reward(prompts=["q"], completions=[{RIGHT!r}], answer=["0.5"]))
model = dataset = None
"""
    for code, printed in (
        (alone, "1.0\n"),
        (for_trl.replace("from trl import GRPOTrainer\n", trainer), "[1.0]\n"),
    ):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert done.stdout == printed, done.stderr


async def test_options_settings_and_files_reach_the_pool(registry):
    settings = {"reward_options": {"weight": 3.0}, "timeout_s": 20.0, "fallbacks": {"fails": "half"}}
    async with VerifierPool.from_registry(f"half,{registry}:fails", registry, **settings) as pool:
        verdict = await pool.verify({"completion": ""})
    assert [(result.adapter, result.reward) for result in verdict.results] == [("half", 3.0), ("fails", 3.0)]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ("nothing", None, "unknown reward function nothing: my_rewards knows .*half"),
        ("half", {"size": 1}, "no reward function of half takes the option size"),
        ([], None, "no reward function is named"),
    ],
)
async def test_what_the_registry_does_not_have_is_the_users_mistake(names, options, message, registry):
    with pytest.raises(ConfigurationError, match=message):
        async with VerifierPool.from_registry(names, registry, reward_options=options):
            pass


def test_a_trl_reward_takes_texts_and_conversations_and_says_none_for_a_failure(registry):
    with VerifierPool.from_registry("sees", registry).as_trl_reward() as reward:
        assert reward.__name__ == "sees"
        rewards = reward(
            prompts=["1+1=", [{"role": "user", "content": "1+1="}], "2+2="],
            completions=["2", [{"role": "assistant", "content": "2"}], "5"],
            completion_ids=[[10], [20], []],
            answer=["2", "2", "4"],
            trainer_state=object(),
        )
        assert rewards == [11.0, 21.0, None]  # the last one has no token to look at
        assert reward(prompts=["1+1="], completions=["3"], completion_ids=[[30]], answer=["2"]) == [30.0]


def test_the_completions_of_one_prompt_are_a_group_of_a_trl_reward(registry):
    with VerifierPool.from_registry("group_size", registry).as_trl_reward() as reward:
        assert reward(prompts=["a", "b", "a"], completions=["x", "y", "z"]) == [2.0, 1.0, 2.0]


async def test_a_trl_reward_may_be_called_from_another_thread_of_a_program_with_a_pool(registry):
    async with VerifierPool.from_registry("half", registry) as pool:
        reward = pool.as_trl_reward()
        assert await asyncio.to_thread(reward, ["q"], ["a"]) == [0.5]
        with pytest.raises(RuntimeError, match="half was called in the event loop of its pool: call it in a"):
            reward(["q"], ["a"])
        reward.close()  # the pool is its owner's
        assert (await pool.verify({"completion": ""})).reward == 0.5


def test_a_trl_reward_whose_pool_cannot_start_says_why_each_time(registry):
    reward = VerifierPool.from_registry("missing", registry).as_trl_reward()
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="unknown reward function missing"):
            reward(["q"], ["a"])


async def test_a_reward_gets_the_variables_that_it_is_to_have_and_no_others(registry, monkeypatch):
    """A run's verifiers get them as an argument, and its parameters hold the names alone."""
    pytest.importorskip("ray")
    from async_grpo.cluster.reward_actors import VerifierActor

    monkeypatch.setenv("MY_KEY", "42.5")
    monkeypatch.setenv("OTHER_KEY", "43.5")
    config = RewardConfig(reward_fns="key", reward_registry=str(registry), reward_env="MY_KEY")
    environment = config.reward_environment()
    assert "42.5" not in repr(config) and environment == {"MY_KEY": "42.5"}
    async with VerifierPool.from_registry("key", registry, reward_env="MY_KEY") as pool:
        assert (await pool.verify({"completion": ""})).reward == 42.5
    with pytest.raises(ConfigurationError, match="--reward-env MY_KEY,NO_KEY: .* has no variable NO_KEY"):
        VerifierPool.from_registry("key", registry, reward_env="MY_KEY,NO_KEY")
    monkeypatch.delenv("MY_KEY")  # as on another node
    source = RewardRegistrySource.from_file(registry)
    actor = VerifierActor(partial(AdapterProcess, source, "key", environment=environment))
    await actor._open(0)
    assert (await actor._methods["score 0"]({"completion": ""}, 20.0)).reward == 42.5
    await actor._methods["close 0"]()


async def test_the_way_of_a_verdict_is_short(registry, monkeypatch):
    """From `verify` to the pipe, and from there to the function: every call that is under way at these two points,
    and those that led to it in the one turn of the event loop between."""
    calls: list[str] = []

    def noted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def seen(*arguments: Any) -> Any:
            stack = [f for f in traceback.extract_stack()[:-1] if "async_grpo/rewards" in f.filename]
            calls.extend(f"{Path(frame.filename).name} {frame.name}" for frame in stack)
            return method(*arguments)

        monkeypatch.setattr(owner, name, seen)

    async with VerifierPool.from_registry("way", registry) as pool:
        noted(AdapterProcess, "score")
        noted(ChildProcess, "ask")
        verdict = await pool.verify({"completion": ""})
    assert verdict.status is RewardStatus.FAILED
    in_child = verdict.results[0].reason.split(" at ")[0].removeprefix("ValueError: ").split(" > ")
    calls += ["child_process.py ask", *(call for call in in_child if not call.endswith((" way", " main")))]
    assert len(calls) <= MAX_CALLS - RUN_CALLS, calls
    assert len({call.split()[0] for call in calls}) <= MAX_FILES - RUN_FILES, calls
