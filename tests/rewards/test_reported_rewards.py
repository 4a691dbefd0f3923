"""Rewards that return or do odd things: each sample has a reward or a clear reason, and the process goes on.

The rewards are those of reports/rewards.py. A few of them hang or start processes; they are marked as slow.
"""

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from reported_inputs import REPORTS, needs_reports, reported_rows

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.adapter.result import describe, read_answer
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.isolation.child import Reward, run_plain

PAGE = Path(__file__).parents[2] / "reward_registry.py"
FILE = REPORTS / "rewards.py"
ROWS = reported_rows("rewards_rows.jsonl")
TIMEOUT_S = 4.0
HANGING_TIMEOUT_S = 1.0  # for rewards that compute until they are killed
ANY = None  # any reward is right
# Rewards that are computed in this process
REWARDS: dict[str, float | None] = {
    **dict.fromkeys(("boolean", "npint", "npbool"), 1.0),
    **dict.fromkeys(("np64", "np32", "nparr0", "torch0", "torchgrad", "decimal", "fraction", "dict_np"), 0.5),
    **dict.fromkeys(
        ("dict_bool_extra", "dict_score", "alarm", "aio", "threads", "mutates", "kw", "warns"), 0.5
    ),
    **dict.fromkeys(("tqdm", "lam", "Cls", "instance", "part"), 0.5),
    "dict_both": 0.7,
    "state": ANY,
    "rnd": ANY,
    "env": ANY,
    "cwd": 0.0,
}
# Reasons why there is no reward, in this process
REASONS = {
    "none": "returned a NoneType, not a number or a dict with a `reward`: return a number on every path",
    "nan": "reward=nan: only finite numbers",
    "inf": "reward=inf: only finite numbers",
    "text": "returned a str, not a number or a dict with a `reward`: convert it with float()",
    "nparr1": "returned a ndarray, not a number or a dict with a `reward`: return one element of it",
    "lst": "returned a list, not a number or a dict with a `reward`: return one number for the one sample",
    "cmplx": "returned a complex, not a number",
    "dict_nan_extra": "length=nan: only finite numbers",
    "dict_none_extra": "length=None: only finite numbers",
    "dict_text_extra": "why='good': only finite numbers are allowed; return (answer, query, explanation) to log a text",
    "dict_acc": "pred='7': only finite numbers are allowed; return (answer, query, explanation) to log a text",
    "tup2": "returned a tuple, not a number or a dict with a `reward`: the only tuple allowed is (answer, query, expl",
    "gen": "returned a generator, not a number or a dict with a `reward`: use `return` instead of `yield`",
    "huge": "reward=1000000",
    "big": "reward=1e+38: a reward lies between -1e+06 and 1e+06",
    "exits": "SystemExit: 0 at rewards.py:",
    "trl": "returned a list, not a number or a dict with a `reward`: return one number for the one sample (wrap",
    "recursion": "RecursionError: maximum recursion depth exceeded",
    "kbi": "KeyboardInterrupt at rewards.py:",
    "unpicklable": "E: 1 at rewards.py:",
    "badmsg": "E: its message cannot be read (ValueError) at rewards.py:",
    "surrogate": "ValueError: bad \\ud800 text at rewards.py:",
}
# Functions that cannot be called with a sample are refused at the start
REFUSED = {
    "trl2": "TRL's signature",
    "verl": "takes one argument, the sample",
    "openrlhf": "takes one argument, the sample",
    "two": "takes one argument, the sample",
}
# In a process of their own: the reward, or the reason why there is none
IN_A_PROCESS: dict[str, float | str | None] = {
    "prints": 0.5,
    "npbool": 1.0,
    "closes": 0.5,
    "closeall": "died: the reward closed file descriptors that it had not opened",
    "fork": 0.5,
    "memory": "MemoryError at rewards.py:",
    "exits": "SystemExit: 0",
    "badmsg": "E: its message cannot be read",
    "chdir": 0.5,
    "setlocale": 0.5,
    "logs": 0.5,
    "daemon": 0.5,
    "subp": 0.5,
    "mpqueue": 0.5,
}
SLOW: dict[str, float | str | None] = {
    "aio_old": 0.5,
    "procs": 0.5,
    "mp": 0.5,
    "mpspawn": 0.5,
    "slow": "no answer within 1 s",
    "regexbomb": "no answer within 1 s",
    "sympyhang": "no answer within 1 s",
}


@pytest.fixture(scope="module")
def rewards() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reported_rewards", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer_of(reward: Callable[..., Any]) -> dict[str, Any]:
    ((answer,),) = run_plain(Reward(reward, {}).replies([{"sample": ROWS[0]}]))
    return answer


@needs_reports
@pytest.mark.parametrize("name", REWARDS)
def test_numbers_in_any_form_are_rewards(name, rewards):
    answer = answer_of(getattr(rewards, name))
    assert (answer["status"], answer["reason"]) == ("ok", "")
    assert REWARDS[name] in (ANY, answer["reward"]) and type(answer["reward"]) is float
    assert ROWS[0]["completion"] == "7"


@needs_reports
@pytest.mark.parametrize("name", REASONS)
def test_what_is_no_reward_says_why_and_what_to_do(name, rewards):
    answer = answer_of(getattr(rewards, name))
    assert (answer["status"], answer["reward"]) == ("failed", None)
    reason = answer["reason"].replace("reported_rewards.py", "rewards.py")
    assert REASONS[name] in reason and "\n" not in reason
    reason.encode()


@needs_reports
@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_take_no_sample_are_refused_at_the_start(name, rewards):
    with pytest.raises(ConfigurationError, match=REFUSED[name]):
        Reward(getattr(rewards, name), {})


async def score_twice(name: str) -> None:
    expected = IN_A_PROCESS[name] if name in IN_A_PROCESS else SLOW[name]
    hangs = isinstance(expected, str) and "no answer within" in expected
    timeout_s = HANGING_TIMEOUT_S if hangs else TIMEOUT_S
    worker = AdapterProcess(RewardRegistrySource.from_file(PAGE).with_files([f"{FILE}:{name}"]), name)
    try:
        # What is closed cannot be closed again by the next call
        rows = ROWS[:1] if name == "closes" else ROWS
        for row in rows:
            try:
                result = await worker.score(row, timeout_s)
            except WorkerLost as error:
                assert isinstance(expected, str) and expected in str(error)
                continue
            if isinstance(expected, str):
                assert expected in result.reason
            else:
                assert (result.reward, result.reason) == (expected, "")
        child = worker._child
        assert child is not None
    finally:
        await worker.close()
    assert not Path(f"/proc/{child.pid}").exists()


@needs_reports
@pytest.mark.parametrize("name", sorted(IN_A_PROCESS.keys() - {"closeall"}))
async def test_odd_rewards_in_a_process_of_their_own_leave_none_behind(name):
    await asyncio.wait_for(score_twice(name), 60)


@needs_reports
def test_a_reward_that_closes_descriptors_by_their_numbers_dies_by_name():
    """It closes 3 to 63, and the process of the tests may have opened so many that the channel has a higher number."""
    code = "import asyncio, test_reported_rewards as tests; asyncio.run(tests.score_twice('closeall'))"
    folders = [Path(__file__).parent, Path(__file__).parents[1] / "helpers", PAGE.parent]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@needs_reports
@pytest.mark.parametrize("name", SLOW)
async def test_rewards_that_hang_or_start_processes_leave_none_behind(name):
    await asyncio.wait_for(score_twice(name), 100)


@needs_reports
def test_every_reported_reward_is_tried(rewards):
    ours = {*REWARDS, *REASONS, *REFUSED, *IN_A_PROCESS, *SLOW}
    reported = {name for name, value in vars(rewards).items() if callable(value) and name[0] != "_"}
    assert {name for name in reported if getattr(rewards, name).__class__ is not ModuleType} == ours


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (np.bool_(False), 0.0),
        (np.float16(0.5), 0.5),
        (np.array(True), 1.0),
        (torch.tensor(1), 1.0),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
        ({"reward": np.bool_(True), "parts": Decimal("0.25")}, 1.0),
        ((np.bool_(True), "q", None), 1.0),
        (Fraction(1, 4), 0.25),
        (-2, -2.0),
        # Neighbours
        (np.float32("nan"), None),
        (np.array([True]), None),
        (np.array(["1"]), None),
        (np.str_("1"), None),
        (np.array("1"), None),
        (np.datetime64("2026-01-01"), None),
        (torch.tensor([0.5]), None),
        (torch.tensor(1j), None),
        (Decimal("NaN"), None),
        (Decimal("1e400"), None),
        (b"1", None),
        ({"reward": None}, None),
        ({"reward": 1.0, "part": np.array([1.0])}, None),
    ],
)
def test_numbers_of_numerical_libraries_count(returned, reward):
    answer = read_answer(returned, {})
    assert answer["reward"] == reward
    assert (answer["status"] == "ok") is (reward is not None) and answer["status"] in ("ok", "failed")


def test_steps_may_be_numbers_of_numerical_libraries():
    sample = {"completion_token_ids": [5, 6, 7]}
    answer = read_answer(
        {"token_rewards": [np.bool_(True), Decimal("0.5"), torch.tensor(0.25)]}, sample, process=True
    )
    assert (answer["reward"], answer["steps"]) == (1.75, [[0, 1.0], [1, 0.5], [2, 0.25]])


@pytest.mark.parametrize(
    ("function", "options", "is_refused"),
    [
        (lambda: 1.0, {}, True),
        (lambda sample, gold: 1.0, {}, True),
        (lambda prompts, completions: [1.0], {}, True),
        (lambda *, sample: 1.0, {}, True),
        (lambda **columns: 1.0, {}, True),
        (lambda sample, gold: 1.0, {"gold": 3}, False),
        (lambda sample, gold=3: 1.0, {}, False),
        (lambda sample, *rest, **options: 1.0, {}, False),
        (lambda *samples: 1.0, {}, False),
        (lambda completions: 1.0, {}, False),
    ],
)
def test_the_arguments_of_a_reward_are_checked_with_its_options(function, options, is_refused):
    if not is_refused:
        Reward(function, options)
        return
    with pytest.raises(ConfigurationError, match="a reward takes one argument"):
        Reward(function, options)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), "MemoryError"),
        (ValueError("a\nb"), "ValueError: a\nb"),
        (ConfigurationError("use another"), "use another"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_errors_are_described_by_type_and_message(error, text):
    assert describe(error) == text
