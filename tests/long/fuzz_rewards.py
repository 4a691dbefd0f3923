"""Hostile and nearly right text for the rewards that read text, held against checkers that share no code with them.

    nice -n 15 python -W ignore -m tests.long.fuzz_rewards --countdown 1000000 --math 50000

A violation is an exception, a text of the model that is executed (it would leave its mark in the interpreter's audit
events), a call that takes longer than a sample may, or a reward that the checker denies. Prints each, then the counts;
the exit status is 1 if there was any.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from fuzz_texts import MARK, Case, countdown_cases, math_cases

from async_grpo.rewards.builtin import countdown, math_verify, mathd, sympy

LIMIT_S = 20.0  # of processor time, for one sample
MATH = {  # reward -> by how much a number may differ that it accepts
    "mathd": (mathd.score, Fraction(0)),
    "sympy": (sympy.score, Fraction(1, 10**9)),
    "math_verify": (math_verify.score, Fraction(1, 10**6)),  # the library rounds to six decimals
}
_EVENTS = {"compile", "exec", "open", "os.system", "subprocess.Popen", "import"}

Score = Callable[[dict[str, Any]], dict[str, float]]
executed: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: text of the model that reaches one of the interpreter's dangerous places carries the mark."""
    if event in _EVENTS and MARK in repr(arguments):
        executed.append(f"{event}{arguments!r:.200}")


@dataclass
class Report:
    num_texts: int = 0
    num_accepted: int = 0
    num_refused: int = 0  # though the checker would accept: a matter of strictness, not of safety
    slowest_s: float = 0.0
    slowest: str = ""
    unread: list[str] = field(default_factory=list)  # accepted, and the checker cannot say
    violations: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.num_texts} texts, {self.num_accepted} accepted ({len(self.unread)} of them not read by the checker), "
            f"{self.num_refused} refused that the checker accepts, {len(self.violations)} violations, "
            f"slowest {self.slowest_s * 1000:.0f} ms: {self.slowest}"
        )


def attack(score: Score, cases: Iterator[Case], count: int) -> Report:
    report = Report()
    for _ in range(count):
        row, checker = next(cases)
        report.num_texts += 1
        started_s = time.process_time()
        try:
            result = score(row)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # time-outs of libraries, too, must not get out
            report.violations.append(f"{type(error).__name__}: {error!s:.200} on {row!r:.500}")
            continue
        took_s = time.process_time() - started_s
        if took_s > report.slowest_s:
            report.slowest_s, report.slowest = took_s, f"{row!r:.100}"
        if took_s > LIMIT_S:
            report.violations.append(f"{took_s:.1f} s on {row!r:.500}")
        if executed:
            report.violations.append(f"executed {executed.pop()} on {row!r:.500}")
        _compare(result.get("answer_reward", result["reward"]) >= 1.0, checker(), row, report)
    return report


def _compare(accepted: bool, verdict: bool | None, row: dict[str, Any], report: Report) -> None:
    report.num_accepted += accepted
    report.num_refused += verdict is True and not accepted
    if accepted and verdict is None:
        report.unread.append(f"{row!r:.500}")
    if accepted and verdict is False:
        report.violations.append(f"accepted: {row!r:.500}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--countdown", type=int, default=20_000, help="texts")
    parser.add_argument("--math", type=int, default=1000, help="texts for each of the three")
    parser.add_argument(
        "--show", type=int, default=0, help="accepted texts to print that the checker cannot read"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.addaudithook(watch)
    runs = {"countdown": (countdown.score, countdown_cases(random.Random(args.seed)), args.countdown)}
    for name, (score, tolerance) in MATH.items():
        runs[name] = (score, math_cases(random.Random(args.seed), tolerance), args.math)
    num_violations = 0
    for name, run in runs.items():
        started_s = time.monotonic()
        report = attack(*run)
        num_violations += len(report.violations)
        for text in report.violations[:20]:
            print(f"{name}: VIOLATION: {text}")
        for text in report.unread[: args.show]:
            print(f"{name}: accepted, not read by the checker: {text}")
        print(f"{name}: {time.monotonic() - started_s:.0f} s, {report}", flush=True)
    return int(num_violations > 0)


if __name__ == "__main__":
    sys.exit(main())
