"""Unit tests on generated Python code, in a sandbox without network: see `async_grpo.rewards.sandbox`.

The code is the last block fenced as Python behind the thought, else the last block fenced without a language, else the
whole completion. The row has these columns:

    tests     a list. {"input": text, "output": text} runs the code as a program. Its standard output must be the expected
              one, except for blanks at the ends of lines and empty lines at the end, and its exit status must be 0.
              {"assert": text} runs Python statements against the code: "assert f(1) == 2", several lines, or a
              function `check(candidate)` with a call of it. The statements and the code exchange plain values and objects,
              but no functions that the statements define.
    prelude   optional: text before the code, for imports or classes that the prompt promised

The code has Python's standard library, threads, and a folder in which nothing can be written. Each test is a run of its
own. The expected output never enters the process that runs the code.
"""

import time
from typing import Any

from async_grpo.rewards.builtin.answers import completion_text, fenced_blocks
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS
from async_grpo.rewards.sandbox.run import Sandbox, SandboxRun

MAX_CHARACTERS = 100_000  # of the code
MIN_REMAINING_S = 0.01  # with less time, a test is not begun
_PYTHON = ("python", "python3", "py")
_TEST_KEYS = ({"assert"}, {"input", "output"})  # of the two kinds of tests


def code_of(text: str) -> str:
    """Return the code in a completion."""
    spoken = text.rpartition("</think>")[2]
    python_blocks = []
    plain_blocks = []
    for language, code in fenced_blocks(spoken):
        if language in _PYTHON:
            python_blocks.append(code)
        elif not language:
            plain_blocks.append(code)
    candidates = python_blocks or plain_blocks or [spoken]
    return candidates[-1]


def tests_of(sample: dict[str, Any]) -> list[dict[str, str]]:
    """Return the row's tests.

    Raises:
        ValueError: The row has no tests, or a test is neither of the two kinds.
    """
    tests = sample.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"a row for `code` needs a list `tests`, not {tests!r:.200}")
    for test in tests:
        keys = test.keys() if isinstance(test, dict) else ()
        if keys not in _TEST_KEYS or not all(isinstance(text, str) for text in test.values()):
            raise ValueError(f"a test must have texts as input and output, or as assert, not {test!r:.200}")
    return tests


def same_output(output: str, expected: str) -> bool:
    """Return whether two outputs are equal, except for blanks at the ends of lines and empty lines at the end."""
    return _stripped_lines(output) == _stripped_lines(expected)


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def score(
    sample: dict[str, Any],
    *,
    test_seconds: float = 4.0,
    total_seconds: float = 20.0,
    memory_mb: float = 1024,
    all_or_nothing: bool = False,
    allow_unsandboxed: bool = False,
) -> dict[str, float]:
    """Return the share of the tests that the code passes.

    Args:
        sample: The completion and its row.
        test_seconds: Limit of one test's processor time; on the clock it may take twice as long.
        total_seconds: Limit of all tests on the clock. Tests that have not run by then count as timed out. Keep it below
            the run's time-out for a reward, after which the sample would not be wrong but unknown.
        memory_mb: Limit of the process's address space, in MiB.
        all_or_nothing: The reward is 1 if the code passes all tests, else 0.
        allow_unsandboxed: Run the code even where nothing keeps it off the network.

    Returns:
        `reward`; the numbers of tests `passed`, `total` and `timed_out`; and `network_blocked` and `files_hidden` (0 or 1).

    Raises:
        ValueError: The row has no usable tests.
        ConfigurationError: Nothing keeps the code off the network, and that is not allowed.
    """
    tests = tests_of(sample)
    code = _code_with_prelude(sample)
    passed = 0
    timed_out = 0
    levels: frozenset[str] = frozenset()  # of confinement, which all tests had
    deadline = time.monotonic() + total_seconds
    for position, test in enumerate(tests):
        has_failed = passed < position
        if len(code) > MAX_CHARACTERS or (all_or_nothing and has_failed):
            break
        remaining_s = deadline - time.monotonic()
        if remaining_s <= MIN_REMAINING_S:
            timed_out += len(tests) - position
            break
        sandbox = Sandbox(
            cpu_s=test_seconds,
            wall_s=min(2 * test_seconds, remaining_s),
            memory_bytes=int(memory_mb * 2**20),
            allow_unsandboxed=allow_unsandboxed,
        )
        run, is_passed = _run_test(sandbox, code, test)
        passed += int(is_passed)
        timed_out += int(run.timed_out)
        levels = levels & run.levels if position else run.levels
    return {
        "reward": float(passed == len(tests)) if all_or_nothing else passed / len(tests),
        "passed": float(passed),
        "total": float(len(tests)),
        "timed_out": float(timed_out),
        "network_blocked": float(bool(levels & NETWORK_LEVELS)),
        "files_hidden": float("landlock" in levels),
    }


def _code_with_prelude(sample: dict[str, Any]) -> str:
    return f"{sample.get('prelude') or ''}\n{code_of(completion_text(sample))}"


def _run_test(sandbox: Sandbox, code: str, test: dict[str, str]) -> tuple[SandboxRun, bool]:
    """Run one test, and return the run and whether the code has passed."""
    if "assert" in test:
        run = sandbox.run_tests(code, test["assert"])
        return run, run.ended_well
    run = sandbox.run_program(code, test["input"])
    output = run.output.decode(errors="replace")
    return run, run.ended_well and same_output(output, test["output"])
