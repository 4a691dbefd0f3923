"""Unit tests on generated Python code, in a sandbox without network: see `async_grpo.rewards.sandbox`.

The code is the last block fenced as Python (else the last one fenced without a language) behind the thought, or the
whole completion. The row has

    tests     a list. {"input": text, "output": text} runs the code as a program: its standard output must be the
              expected one, but for blanks at the ends of lines and empty lines at the end, and its exit status 0.
              {"assert": text} runs Python statements against the code: "assert f(1) == 2", several lines, or a
              function `check(candidate)` with a call of it. They exchange plain values and objects with the code, no
              functions of their own.
    prelude   optional: text put before the code, for imports or classes that the prompt promised

The code has Python's standard library, threads, and a folder in which nothing can be written. Each test is a run of
its own. What was expected never enters the process that runs the code.
"""

import time
from typing import Any

from async_grpo.rewards.builtin.answers import completion_text, fenced_blocks
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS
from async_grpo.rewards.sandbox.run import Sandbox

MAX_CHARACTERS = 100_000
_PYTHON = ("python", "python3", "py")
_KINDS = ({"assert"}, {"input", "output"})  # of tests, by their keys


def code_of(text: str) -> str:
    text = text.rpartition("</think>")[2]
    blocks = fenced_blocks(text)
    python = [code for language, code in blocks if language in _PYTHON]
    return (python or [code for language, code in blocks if not language] or [text])[-1]


def tests_of(sample: dict[str, Any]) -> list[dict[str, str]]:
    """The row's tests. Raises ValueError if there are none, or one is neither of the two kinds."""
    tests = sample.get("tests")
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"a row for `code` needs a list `tests`, not {tests!r:.200}")
    for test in tests:
        keys = test.keys() if isinstance(test, dict) else ()
        if keys not in _KINDS or not all(isinstance(text, str) for text in test.values()):
            raise ValueError(f"a test must have texts as input and output, or as assert, not {test!r:.200}")
    return tests


def same_output(given: str, expected: str) -> bool:
    """Line by line, but for blanks at the ends of lines and empty lines at the end."""
    one, other = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (given, expected))
    return one == other


def score(
    sample: dict[str, Any],
    *,
    test_seconds: float = 4.0,
    total_seconds: float = 20.0,
    memory_mb: float = 1024,
    all_or_nothing: bool = False,
    allow_unsandboxed: bool = False,
) -> dict[str, float]:
    """The share of the tests that the code passes; with `all_or_nothing` 1 if it passes all, else 0.

    Args:
        test_seconds: processor time for one test; on the clock it may take twice that.
        total_seconds: on the clock, for all tests; those not run by then count as timed out. Keep it below the run's
            time-out for a reward, by which a sample is not wrong but unknown.
        memory_mb: address space of the process, in MiB.
        allow_unsandboxed: run the code even where nothing keeps it off the network.

    Returns `passed`, `total` and `timed_out` (tests), and `network_blocked` and `files_hidden` (0 or 1).

    ValueError: the row has no usable tests.
    ConfigurationError: nothing keeps the code off the network, and that was not allowed.
    """
    tests = tests_of(sample)
    code = f"{sample.get('prelude') or ''}\n{code_of(completion_text(sample))}"
    passed = timed_out = 0
    levels = frozenset[str]()
    deadline = time.monotonic() + total_seconds
    for position, test in enumerate(tests):
        if len(code) > MAX_CHARACTERS or (all_or_nothing and passed < position):
            break
        if (remaining_s := deadline - time.monotonic()) <= 0.01:
            timed_out += len(tests) - position
            break
        sandbox = Sandbox(
            cpu_s=test_seconds,
            wall_s=min(2 * test_seconds, remaining_s),
            memory_bytes=int(memory_mb * 2**20),
            allow_unsandboxed=allow_unsandboxed,
        )
        if "assert" in test:
            run = sandbox.run_tests(code, test["assert"])
            passed += run.ended_well
        else:
            run = sandbox.run_program(code, test["input"])
            output = run.output.decode(errors="replace")
            passed += run.ended_well and same_output(output, test["output"])
        timed_out += run.timed_out
        levels = levels & run.levels if position else run.levels
    return {
        "reward": float(passed == len(tests)) if all_or_nothing else passed / len(tests),
        "passed": float(passed),
        "total": float(len(tests)),
        "timed_out": float(timed_out),
        "network_blocked": float(bool(levels & NETWORK_LEVELS)),
        "files_hidden": float("landlock" in levels),
    }
