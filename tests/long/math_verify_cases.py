"""Compare the reward `math_verify` with the bare library on the library's own test cases.

    pip download --no-binary :all: --no-deps math-verify && tar xzf math_verify-*.tar.gz
    python -W ignore -m tests.long.math_verify_cases math_verify-0.9.0/tests

Prints each case that the reward decides otherwise than the case expects, and what the bare library says of it. The exit
status is 1 if the bare library, with its defaults, is right on a case on which the reward is wrong.
"""

import argparse
import ast
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from math_verify import parse, verify

from async_grpo.rewards.builtin.math_verify import score

Case = tuple[str, str, bool]  # gold answer, text with the answer, whether they are equal
EXPECTED_NAMES = {"expected", "result"}  # how the library's tests call the last part of a case


def cases_in(path: Path) -> Iterator[Case]:
    """Yield the cases of all parametrized tests of a file that compare a text with a gold answer."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.parametrize"):
            continue
        names = [name.strip() for name in ast.literal_eval(node.args[0]).split(",")]
        expected_names = EXPECTED_NAMES & set(names)
        if not {"gold", "pred"} <= set(names) or not expected_names:
            continue
        # The values are literals, and formatted texts that call the module `math`
        for values in eval(ast.unparse(node.args[1]), {"math": math}):
            case = dict(zip(names, values, strict=True))
            is_strict = case.get("strict", True) and not case.get("allow_set_relation_comp", False)
            if is_strict and isinstance(case["gold"], str):
                yield case["gold"], case["pred"], bool(case[expected_names.copy().pop()])


def says_library(gold: str, text: str) -> str:
    """Return what the library decides with its defaults."""
    return str(verify(parse(gold), parse(text)))


def says_reward(gold: str, text: str) -> str:
    """Return what the reward decides, or the name of the error that it raises."""
    try:
        return str(score({"answer": gold, "completion": text})["reward"] == 1.0)
    except (ValueError, TimeoutError) as error:
        return type(error).__name__


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with the library's tests")
    args = parser.parse_args()
    counts: Counter[tuple[bool, bool]] = Counter()
    for path in sorted(args.folder.glob("test_*.py")):
        for gold, text, is_equal in cases_in(path):
            library = says_library(gold, text)
            reward = says_reward(gold, text)
            counts[library == str(is_equal), reward == str(is_equal)] += 1
            if reward != str(is_equal):
                mark = "WORSE" if library == str(is_equal) else "as the library"
                print(f"{mark}: {path.name}: {gold[-100:]!r} and {text[-160:]!r}: {reward}, not {is_equal}")
    print(f"{counts.total()} cases: library right {counts[True, True] + counts[True, False]}, ", end="")
    print(f"reward right {counts[True, True] + counts[False, True]}, worse {counts[True, False]}")
    return int(counts[True, False] > 0)


if __name__ == "__main__":
    sys.exit(main())
