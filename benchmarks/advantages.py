"""Measure what the computation of advantages costs: CPU seconds and memory of a step, microseconds per group.

    python -m benchmarks.advantages                     128 groups of 32 samples of up to 8,192 tokens
    python -m benchmarks.advantages --groups 64 --samples 8 --tokens 64

The cases are: estimators with one score per sample (`grpo`, and `reinforce_plus_plus_baseline` and `gdpo`, which need
the whole batch), the same with the KL in the reward, and rewards of tokens (`reinforce_plus_plus` with a discount,
`prime_rloo`). Each case runs in a separate process. Memory is the growth of the process's peak.
"""

import json
import multiprocessing
import resource
import time
from typing import Annotated

import numpy as np
import typer

from async_grpo.experience.config import BatchConfig, RunFacts
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.testing import completion
from async_grpo.types import AdapterResult, Group, Prompt, RewardStatus, Sample, Verdict

KL = {"kl_in_reward": True, "kl_coef": 0.01}
CASES = {
    "grpo": {"advantage_estimator": "grpo"},
    "gdpo": {"advantage_estimator": "gdpo"},
    "reinforce_plus_plus_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline"},
    "reinforce_plus_plus_baseline, KL in the reward": {"advantage_estimator": "reinforce_plus_plus_baseline"}
    | KL,
    "reinforce_plus_plus, KL in the reward": {"advantage_estimator": "reinforce_plus_plus"} | KL,
    "reinforce_plus_plus, gamma 0.99": {
        "advantage_estimator": "reinforce_plus_plus",
        "estimator_options": "gamma=0.99",
    },
    "grpo_process": {"advantage_estimator": "grpo_process"},
    "prime_rloo": {"advantage_estimator": "prime_rloo"},
}


def random_groups(number: int, size: int, longest: int) -> list[Group]:
    """Return random groups. Lengths are log-normal around a tenth of `longest`.

    Each sample has a reward of 0 or 1, and four steps with step rewards.
    """
    rng = np.random.default_rng(0)

    def sample(prompt: Prompt) -> Sample:
        length = int(np.clip(rng.lognormal(np.log(max(longest / 10, 4)), 1.0), 4, longest))
        steps = [(int(at), float(rng.random())) for at in np.linspace(length // 4, length - 1, 4)]
        results = (
            AdapterResult("right", RewardStatus.OK, float(rng.integers(2))),
            AdapterResult("steps", RewardStatus.OK, 1.0, steps=tuple(steps)),
        )
        verdict = Verdict(RewardStatus.OK, results[0].reward, results)
        answer = completion(length)
        return Sample(prompt, answer, verdict, ref_logprobs=answer.logprobs - np.float32(0.1))

    prompts = [Prompt(i, np.ones(4, np.int32), {}) for i in range(number)]
    return [Group(p, tuple(sample(p) for _ in range(size)), 0, p.ordinal) for p in prompts]


def measure(case: str, groups: int, samples: int, tokens: int, repeats: int) -> dict[str, float]:
    options = CASES[case]
    rewards_on_tokens = options["advantage_estimator"] in ("grpo_process", "prime_rloo")
    plan = GroupAdvantages(
        BatchConfig(**options), RunFacts(process_rewards=("steps",) if rewards_on_tokens else ())
    )
    step = random_groups(groups, samples, tokens)
    for group in step[: 4 * plan.group_local]:
        plan([group], 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    for _ in range(repeats):
        for together in [[group] for group in step] if plan.group_local else [step]:
            plan(together, 0)
    seconds = (time.process_time() - begun) / repeats
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "tokens": sum(len(s.completion) for g in step for s in g.samples),
        "seconds": seconds,
        "us_per_group": seconds / groups * 1e6,
        "MB": grown / 1024,
    }


def main(
    groups: Annotated[int, typer.Option(help="Groups of a step.")] = 128,
    samples: Annotated[int, typer.Option(help="Samples of a group.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens of the longest completion.")] = 8192,
    repeats: Annotated[int, typer.Option(help="Steps that are timed.")] = 1,
    case: Annotated[str, typer.Option(help="One of the cases (default: all).")] = "",
) -> None:
    spawn = multiprocessing.get_context("spawn")
    found = {}
    for name in [case] if case else CASES:
        with spawn.Pool(1) as pool:
            found[name] = pool.apply(measure, (name, groups, samples, tokens, repeats))
    print(
        f"| {groups} x {samples} samples of at most {tokens} tokens | CPU s | us per group | MB |\n|---|---|---|---|"
    )
    for name, taken in found.items():
        print(f"| {name} | {taken['seconds']:.3f} | {taken['us_per_group']:.0f} | {taken['MB']:.0f} |")
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
