"""Measure how much of the token budget packing uses, and how equal the work of the ranks is.

    python -m benchmarks.packing --samples 512 1024 --ranks 2 4 8 --seeds 3

Lengths are like those of DeepScaleR: log-normal completions (median 2,500 tokens, sigma 0.9, at most --longest),
prompts of 60 to 300 tokens, groups of 16, a budget of 36,000 tokens per rank. Samples arrive in three ways: all at once
(`whole`), in random order faster than the trainers take them (`ahead`), or so slowly that the trainers always wait
(`hungry`).

A round has one micro-batch for each rank. `used` is tokens / (ranks x budget). It leaves out the last round of each
step, which has only the rest. `even` is (mean cost of the ranks) / (highest cost), the fraction of the time in which
ranks work. `rounds` counts all rounds; the smallest number that the tokens allow stands beside it. The cost is tokens +
squared lengths / (12 x hidden size), see `experience/packing.py`. `ms` is the CPU time of packing a step, with the time
per sample in brackets.
"""

import argparse
import time

import numpy as np

from async_grpo.experience.packing import Packer
from async_grpo.messages import MicroBatch
from async_grpo.testing import completion
from async_grpo.types import Prompt, RewardStatus, Sample, Verdict

BUDGET = 36_000
OK = Verdict(RewardStatus.OK, 1.0)


def samples_of(count: int, longest: int, draw: np.random.Generator) -> list[Sample]:
    lengths = np.clip(2500 * np.exp(0.9 * draw.standard_normal(count)), 16, longest).astype(int)
    made = []
    for number, length in enumerate(lengths):
        if number % 16 == 0:
            prompt = Prompt(number // 16, np.ones(draw.integers(60, 301), np.int32), {})
        ones = np.ones(length, np.float32)
        made.append(Sample(prompt, completion(int(length)), OK, ones, ones.astype(bool), int(length)))
    return made


def rounds_of(packer: Packer, samples: list[Sample], way: str) -> list[list[MicroBatch]]:
    """Return the rounds of a step.

    Trainers that are ahead ask for a round after every sample, the others after as many samples as fill a round.
    """
    per_round = 1 if way == "hungry" else 40 * packer.num_ranks
    rounds: list[list[MicroBatch]] = []
    for number, sample in enumerate(samples):
        packer.add(sample)
        if way != "whole" and number % per_round == 0 and (round_ := packer.full_round()):
            rounds.append(round_)
    return rounds + packer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--longest", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    print("samples ranks longest way     used   lowest  even   lowest  rounds (fewest)  ms")
    for count, ranks, longest in ((c, r, m) for c in args.samples for r in args.ranks for m in args.longest):
        for way in ("whole", "ahead", "hungry"):
            used, even, rounds, fewest, seconds = [], [], 0, 0, 0.0
            for seed in range(args.seeds):
                step = samples_of(count, longest, np.random.default_rng(seed))
                packer = Packer(ranks, BUDGET, args.hidden_size)
                started = time.process_time()
                found = rounds_of(packer, step, way)
                seconds += time.process_time() - started
                costs = [[_cost(batch, args.hidden_size) for batch in of_ranks] for of_ranks in found]
                used += [
                    sum(len(b.input_ids) for b in of_ranks) / (ranks * BUDGET) for of_ranks in found[:-1]
                ]
                even += [(np.mean(of_ranks) / max(of_ranks), max(of_ranks)) for of_ranks in costs]
                rounds += len(found)
                fewest += -(-sum(s.num_tokens for s in step) // (ranks * BUDGET))
            shares, weights = zip(*even, strict=True)
            print(
                f"{count:>7} {ranks:>5} {longest:>7} {way:<7} {np.mean(used):.3f}  {min(used):.3f}  "
                f"{np.average(shares, weights=weights):.3f}  {min(shares):.3f}  {rounds:>6} ({fewest})  "
                f"{1e3 * seconds / args.seeds:>8.1f} ({1e3 * seconds / args.seeds / count:.3f})",
                flush=True,
            )


def _cost(batch: MicroBatch, hidden_size: int) -> float:
    lengths = np.diff(batch.cu_seqlens).astype(float)
    return float(np.sum(lengths + lengths**2 / (12 * hidden_size)))


if __name__ == "__main__":
    main()
