"""The mathematics rewards on every answer of GSM8K: the gold one is accepted, the neighbour's is not.

    python -m tests.long.gsm8k_rewards test.jsonl --adapters math_verify mathd sympy

FILE has one JSON object per line, whose `answer` ends with "#### NUMBER". Each answer is given in four ways: in a box,
in a box with thousands separators, after "####", and in a sentence (the last two to math_verify only, which reads them).
Prints the counts and each exception; the exit status is 1 if there was any.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from importlib import import_module
from pathlib import Path

BOXED: dict[str, Callable[[str], str]] = {
    "box": lambda number: f"So it is $\\boxed{{{number}}}$.",
    "box with separators": lambda number: f"So it is $\\boxed{{{Decimal(number):,}}}$.",
}
PLAIN: dict[str, Callable[[str], str]] = {
    "marker": lambda number: f"First this, then that.\n#### {number}",
    "sentence": lambda number: f"First 7 of this, then 3 of that. The answer is {number}.",
}


def number_of(answer: str) -> str:
    """What a reader takes for the answer, by Python alone.

    >>> number_of("5 * 300 = 1,500\\n#### 1,500")
    '1500'
    """
    return answer.split("####")[-1].strip().replace(",", "").replace("$", "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--adapters", nargs="+", default=["math_verify", "mathd", "sympy"])
    args = parser.parse_args()
    answers = [json.loads(line)["answer"] for line in args.file.read_text().splitlines()]
    numbers = [number_of(answer) for answer in answers]
    num_wrong = 0
    for name in args.adapters:
        score = import_module(f"async_grpo.rewards.builtin.{name}").score
        for way, write in (BOXED | PLAIN if name == "math_verify" else BOXED).items():
            started, accepted, rejected, pairs = time.monotonic(), 0, 0, 0
            for i, answer in enumerate(answers):
                if score({"completion": write(numbers[i]), "answer": answer})["reward"] == 1.0:
                    accepted += 1
                else:
                    print(f"{name}, {way}: the gold answer {numbers[i]} is refused")
                neighbour = numbers[i - 1]
                if Decimal(neighbour) == Decimal(numbers[i]):
                    continue
                pairs += 1
                if score({"completion": write(neighbour), "answer": answer})["reward"] == 0.0:
                    rejected += 1
                else:
                    print(f"{name}, {way}: {neighbour} is accepted for {numbers[i]}")
            num_wrong += len(answers) - accepted + pairs - rejected
            print(
                f"{name}, {way}: gold accepted {accepted} of {len(answers)}, neighbour's rejected {rejected} of "
                f"{pairs}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
