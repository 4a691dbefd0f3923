"""Runs unit tests on generated Python code, in a sandbox without network access (`async_grpo.rewards.sandbox`).

The code is searched for in the text after the thought (`async_grpo.rewards.answer_reading.python_code`). It is the last
fenced block that does what the tests need: it defines a function or class that they use, or runs as a program. A block that
only shows how another block is used does not count. Blocks that are fenced as Python are preferred to blocks without a
language. If the block needs names that only other blocks define, these blocks are put before it. Without any block, the
code is the text of the only <answer>, or else all text after the thought.

The row has these columns:

    tests     a list of tests, or another form that `async_grpo.rewards.builtin.code_tests` reads, of two kinds:
              {"input": text, "output": text} runs the code as a program with this standard input, whose lines end with
              a line feed. Its standard output must be the expected one, except for blanks at the ends of lines and
              empty lines at the end, and its exit status must be 0. With the option `relative_tolerance` or
              `absolute_tolerance`, numbers with a decimal point or an exponent need only be close.
              {"assert": text} runs Python statements against the code: "assert f(1) == 2", several lines, or a function
              `check(candidate)` and a call of it. Test functions and classes as for pytest and unittest are run, and
              may import from the module `solution`. The statements and the code can exchange plain values and
              objects, but not functions that the statements define.
    prelude   optional: text to insert before the code, for imports or classes that the prompt promised; statements
              `from __future__` of the code are moved before it

The code can use Python's standard library and threads, and runs in a folder that is not writable. Each test is a
separate run. The process that runs the code never receives the expected output.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_grpo.rewards.answer_reading.program_output import Tolerance, same_output
from async_grpo.rewards.answer_reading.python_code import continues, python_code_of, with_prelude
from async_grpo.rewards.builtin.answers import answering_part, completion_text
from async_grpo.rewards.builtin.code_tests import tests_of
from async_grpo.rewards.sandbox.confine import NETWORK_LEVELS
from async_grpo.rewards.sandbox.run import Sandbox, SandboxRun

MAX_CHARACTERS = 100_000  # maximum length of the code; longer code passes no test
MIN_REMAINING_S = 0.01  # a test is not started if less time remains


def code_of(text: str, prelude: str = "", tests: Sequence[dict[str, str]] = ()) -> str:
    """Return the code in a completion, as described above."""
    calls = [test["assert"] for test in tests if "assert" in test]
    is_program = any("input" in test for test in tests)
    return python_code_of(answering_part(text.rpartition("</think>")[2]), prelude, calls, is_program)


def score(
    sample: dict[str, Any],
    *,
    test_seconds: float = 4.0,
    total_seconds: float = 20.0,
    memory_mb: float = 1024,
    all_or_nothing: bool = False,
    relative_tolerance: float = 0.0,
    absolute_tolerance: float = 0.0,
    allow_unsandboxed: bool = False,
) -> dict[str, float]:
    """Return the share of the tests that the code passes.

    Args:
        sample: The completion and its row.
        test_seconds: Maximum processor time of one test. Its wall-clock time may be twice as long.
        total_seconds: Maximum wall-clock time of all tests together. Tests that have not run by then count as timed
            out. Keep it below `--reward-timeout-s`, after which the whole sample would have no reward.
        memory_mb: Maximum address space of the process, in MiB.
        all_or_nothing: Whether the reward is 1 if the code passes all tests and 0 otherwise.
        relative_tolerance: See `Tolerance`. If neither tolerance is given, outputs are compared as text.
        absolute_tolerance: See `Tolerance`.
        allow_unsandboxed: Whether to run the code even if this machine cannot block its network access.

    Returns:
        `reward`, the numbers of tests that `passed` and `timed_out`, their `total` number, and whether the network was
        blocked (`network_blocked`) and files were hidden (`files_hidden`), as 0 or 1.

    Raises:
        ValueError: The row has no usable tests, or a tolerance is negative.
        ConfigurationError: The machine cannot block the network access of the code, and `allow_unsandboxed` is false.
    """
    tests = tests_of(sample)
    tolerance = Tolerance(relative_tolerance, absolute_tolerance)
    code = _code_with_prelude(sample, tests)
    results = _Results()
    deadline = time.monotonic() + total_seconds
    for position, test in enumerate(tests):
        has_failed = results.passed < position
        if len(code) > MAX_CHARACTERS or (all_or_nothing and has_failed):
            break
        remaining_s = deadline - time.monotonic()
        if remaining_s <= MIN_REMAINING_S:
            results.timed_out += len(tests) - position
            break
        sandbox = Sandbox(
            cpu_s=test_seconds,
            wall_s=min(2 * test_seconds, remaining_s),
            memory_bytes=int(memory_mb * 2**20),
            allow_unsandboxed=allow_unsandboxed,
        )
        results.add(*_run_test(sandbox, code, test, tolerance))
    has_passed_all = results.passed == len(tests)
    reward = float(has_passed_all) if all_or_nothing else results.passed / len(tests)
    return {"reward": reward, "total": float(len(tests)), **results.numbers()}


@dataclass
class _Results:
    """Results of the tests that have run."""

    passed: int = 0
    timed_out: int = 0
    # levels of confinement in force in all tests; None before the first test
    levels: frozenset[str] | None = None

    def add(self, run: SandboxRun, is_passed: bool) -> None:
        self.passed += int(is_passed)
        self.timed_out += int(run.timed_out)
        self.levels = run.levels if self.levels is None else self.levels & run.levels

    def numbers(self) -> dict[str, float]:
        levels = self.levels or frozenset()
        return {
            "passed": float(self.passed),
            "timed_out": float(self.timed_out),
            "network_blocked": float(bool(levels & NETWORK_LEVELS)),
            "files_hidden": float("landlock" in levels),
        }


def _code_with_prelude(sample: dict[str, Any], tests: Sequence[dict[str, str]]) -> str:
    prelude = str(sample.get("prelude") or "")
    text = completion_text(sample)
    # A completion without a block may be the body of a function that the prelude begins
    completion = str(sample["completion"])
    white_space = completion[: len(completion) - len(completion.lstrip())]
    indentation = white_space.rpartition("\n")[2]
    if indentation and continues(prelude, indentation + text):
        return f"{prelude}\n{indentation}{text}"
    return with_prelude(prelude, code_of(text, prelude, tests))


def _run_test(
    sandbox: Sandbox, code: str, test: dict[str, str], tolerance: Tolerance
) -> tuple[SandboxRun, bool]:
    """Run one test. Return the run, and whether the code passed the test."""
    if "assert" in test:
        run = sandbox.run_tests(code, test["assert"])
        return run, run.ended_well
    # A program that prints the expected output must not be killed because of the length of its output
    output_bytes = sandbox.output_bytes + len(test["output"].encode(errors="surrogatepass"))
    sandbox = replace(sandbox, output_bytes=output_bytes)
    # Data that was written on Windows has carriage returns, which Python removes there when a program reads its input
    run = sandbox.run_program(code, test["input"].replace("\r\n", "\n"))
    # Bytes that are not UTF-8 become surrogates, which equal no expected text
    output = run.output.decode(errors="surrogateescape")
    return run, run.ended_well and same_output(output, test["output"], tolerance)
