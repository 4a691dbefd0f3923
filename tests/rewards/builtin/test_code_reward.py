"""The code reward: what counts as code, as a test and as passed, and how it runs in the process of its adapter."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from sandboxes import STANDING, needs_network_off

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.adapter.registry_source import RewardRegistrySource
from async_grpo.rewards.answer_reading.program_output import same_output
from async_grpo.rewards.builtin import json_schema
from async_grpo.rewards.builtin.code import code_of, score
from async_grpo.rewards.isolation.adapter_process import AdapterProcess
from async_grpo.rewards.sandbox.run import Sandbox
from async_grpo.types import RewardStatus

PAGE = RewardRegistrySource.from_file(Path(__file__).parents[3] / "reward_registry.py")
pytestmark = needs_network_off


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


DOUBLE = "print(2 * int(input()))"


def test_the_reward_is_the_share_of_tests_of_both_kinds_that_are_passed_or_with_all_or_nothing_no_part():
    code = "def double(n):\n    return 2 * n\n\nif __name__ == '__main__':\n    print(double(int(input())))"
    tests = [
        {"input": "-1\n", "output": "-2\n\n"},
        {"input": "3", "output": "7"},
        {"assert": "assert double(5) == 10"},
        {"assert": "assert double(5) == 11"},
    ]
    result = score({"completion": fenced(code), "tests": tests})
    assert (result["reward"], result["passed"], result["total"], result["timed_out"]) == (0.5, 2.0, 4.0, 0.0)
    assert result["network_blocked"] == 1.0 and result["files_hidden"] == float("landlock" in STANDING)
    assert score({"completion": fenced(code), "tests": tests}, all_or_nothing=True)["reward"] == 0.0
    assert score({"completion": fenced(code), "tests": tests[:1]}, all_or_nothing=True)["reward"] == 1.0


def test_the_prelude_goes_before_the_code():
    tests = [{"assert": "assert f([1, 2]) == 3"}]
    row = {"completion": fenced("def f(a: List[int]) -> int: return sum(a)"), "tests": tests}
    assert score(row)["reward"] == 0.0
    assert score(row | {"prelude": "from typing import List"})["reward"] == 1.0


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print(1)", "print(1)"),
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\nwhich prints\n```\n7\n```", "a\n"),
        ("```\na\n```\n```text\nb\n```", "a\n"),
        ("  ```python\n  a\n  ```", "a\n"),
        ("```python\nthought\n```</think>\n```python\na\n```", "a\n"),
        ("```python\nthought\n```</think> no", " no"),
        ("```python\nhalf", "```python\nhalf"),  # cut off: no code, and no Python either
        ("```python title=x.py\na\n```", "a\n"),
    ],
)
def test_the_code_is_the_last_python_block(text, code):
    assert code_of(text) == code


@pytest.mark.parametrize("tests", [None, [], "assert f() == 1", [{"input": "1"}], [{"assert": 1}], ["x"]])
def test_a_row_without_usable_tests_raises_so_that_the_sample_fails(tests):
    with pytest.raises(ValueError, match="tests|test must"):
        score({"completion": "print(1)", "tests": tests})


@pytest.mark.parametrize(
    "test", ["assert f(1=2", "assert len([1]) == 1", "assert f(lambda x: x)", "class A: pass\nassert f(A())"]
)
def test_tests_that_cannot_be_run_are_the_fault_of_the_row(test):
    with pytest.raises(ValueError, match="cannot be run"):
        score({"completion": "def f(x): return x", "tests": [{"assert": test}]})


def test_the_comparison_forgives_white_space_at_ends_only():
    assert same_output("1 \r\n2\n\n", "1\n2")
    assert not any(same_output(*pair) for pair in (("1\n\n2", "1\n2"), (" 1", "1"), ("1\x0b2", "1\n2")))


def test_a_text_beyond_the_limit_is_wrong():
    assert score({"completion": "#" * 100_001, "tests": [{"input": "", "output": ""}]})["reward"] == 0.0


@pytest.mark.parametrize("text", ["```a\n" * 10_000, "```\na\n" * 10_000, "```python\n" + "``` \t" * 8_000])
def test_fences_without_end_are_read_in_time(text):
    started_s = time.process_time()
    code_of(text)
    json_schema.score({"completion": text}, schema=True)
    # A pattern that looks for the end of each fence took 14 s for texts of twice this length
    assert time.process_time() - started_s < 1.0


def test_time_that_is_used_up_makes_the_remaining_tests_time_outs():
    row = {"completion": "while True: pass", "tests": [{"input": "", "output": ""}] * 50}
    started = time.monotonic()
    result = score(row, total_seconds=0.5)
    assert time.monotonic() - started < 10
    assert (result["reward"], result["timed_out"]) == (0.0, 50.0)


def test_the_metrics_say_when_the_network_was_open(monkeypatch):
    monkeypatch.setattr(
        "async_grpo.rewards.builtin.code.Sandbox", lambda **limits: Sandbox(**limits, levels=())
    )
    row = {"completion": DOUBLE, "tests": [{"input": "1", "output": "2"}]}
    with pytest.raises(ConfigurationError, match="allow_unsandboxed"):
        score(row)
    assert score(row, allow_unsandboxed=True)["network_blocked"] == 0.0


def processes_below(pid: int) -> set[int]:
    children = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        children |= {int(number) for number in path.read_text().split()}
    return children.union(*(processes_below(child) for child in children)) if children else children


async def test_when_the_process_of_the_adapter_is_killed_the_tested_code_dies_with_it():
    worker = AdapterProcess(PAGE, "code", {"test_seconds": 100.0, "total_seconds": 100.0})
    tests = [{"input": "", "output": ""}]
    await worker.start()
    call = asyncio.create_task(
        worker.score({"completion": "import time\nwhile True: time.sleep(1)", "tests": tests}, 3.0)
    )
    below: set[int] = set()
    while not call.done():
        below = max(below, processes_below(os.getpid()), key=len)
        await asyncio.sleep(0.05)
    assert (await call).status is RewardStatus.TIMED_OUT
    await worker.close()
    assert len(below) >= 3  # the adapter's process, the fork server, the tested code
    below -= processes_below(os.getpid())  # a fork server of this process may remain
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
