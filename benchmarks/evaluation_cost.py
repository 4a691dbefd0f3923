"""Measure what an evaluation after every step costs the training, besides the engine time of the evaluations.

    python -m benchmarks.evaluation_cost             # two runs of 60 steps, some 4 minutes

Two equal runs of the tiny countdown model are compared, one of which is evaluated only at its start and its end.
Evaluations use free places of the engines. So a step may become longer by the time that the engines need for the
evaluations' tokens, but not more. This time is (tokens of the evaluations) / (tokens per second of the engines in the
other run). Steps are compared by the median of their wall times.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.runs import countdown_run

# Number of first steps that are not measured, because the evaluation at the start runs during them
WARM_UP = 15


def step_seconds(lines: Sequence[dict[str, Any]]) -> float:
    """Return the median wall time of a step, including saves and evaluations for which it waits."""
    return statistics.median(b["timestamp"] - a["timestamp"] for a, b in pairwise(lines))


def total(lines: Sequence[dict[str, Any]], key: str) -> float:
    return sum(line[key] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs = {
        every: countdown_run(seed=options.seed, steps=options.steps, eval_every=every) for every in (0, 1)
    }
    without, beside = (runs[every].steps[WARM_UP:-1] for every in (0, 1))
    rate = total(without, "tokens_generated") / total(without, "engine_busy_s")
    trained = sum(line["samples_in_batch"] * line["avg_output_tokens"] for line in beside)
    tokens = (total(beside, "tokens_generated") - trained) / len(beside)
    evaluations = [line["step"] for line in runs[1].evaluations if WARM_UP < line["step"] < options.steps]
    before, after = step_seconds(without), step_seconds(beside)
    print(f"without: {before:.3f} s a step; engines make {rate:.0f} tokens a second of their busy time")
    print(
        f"evaluated at every step: {after:.3f} s a step; {len(evaluations)} evaluations in {len(beside)} steps"
    )
    print(f"evaluations: {tokens:.0f} tokens a step, {tokens / rate:.3f} s of engine time")
    waited = total(beside, "seconds_evaluating") / len(beside)
    verdict = "at most" if after - before <= tokens / rate else "MORE THAN"
    print(
        f"a step is longer by {after - before:.3f} s: {verdict} that; it waited {waited:.4f} s for evaluations"
    )


if __name__ == "__main__":
    main()
