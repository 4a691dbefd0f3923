"""Run every recipe, estimator and loss with a real engine, verifier and trainer. Does the held-out accuracy rise?

    python -m benchmarks.recipes --what recipes --steps 40
    python -m benchmarks.recipes --what recipes estimators losses --steps 3

It prints the accuracy before and after, and the last step's reward. With 3 steps it shows only that every name runs to
its end on a real engine, a real verifier and a real FSDP trainer.
"""

import argparse

from async_grpo.algorithm.advantages import ADVANTAGE_ESTIMATORS
from async_grpo.algorithm.losses import POLICY_LOSSES
from async_grpo.config.recipes import RECIPES
from benchmarks.runs import DATA, countdown_run

# Further options of a recipe or an estimator
OPTIONS = {
    **dict.fromkeys(("process", "grpo_process", "prime_rloo"), ("--reward-fns=countdown_steps",)),
    **dict.fromkeys(("opd", "teacher"), (f"--teacher={DATA / 'tiny-model'}",)),
    # The recipe trains only the critic in the first 50 steps. None would be left for the policy
    "vapo": ("--critic-warmup-steps=1",),
    # `countdown_run` asks each question several times
    "flash_reinforce": ("--samples-per-question=1", "--batch-size=128"),
}


def cases(what: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the options of each run, by name."""
    found: dict[str, tuple[str, ...]] = {}
    if "recipes" in what:
        found |= {f"recipe {name}": (f"--recipe={name}", *OPTIONS.get(name, ())) for name in RECIPES}
    if "estimators" in what:
        for name in ADVANTAGE_ESTIMATORS:
            found[f"estimator {name}"] = (f"--advantage-estimator={name}", *OPTIONS.get(name, ()))
    if "losses" in what:
        found |= {f"loss {name}": (f"--policy-loss={name}",) for name in POLICY_LOSSES}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=("recipes", "estimators", "losses"), default=["recipes"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'':>40} {'reward, first 5':>16} {'last 5':>7}", flush=True)
    for name, options in cases(args.what).items():
        run = countdown_run(*options, seed=args.seed, steps=args.steps, eval_every=0)
        rewards = [line["avg_reward"] for line in run.steps]
        first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
        print(f"{name:>40} {first:>16.3f} {last:>7.3f}", flush=True)


if __name__ == "__main__":
    main()
