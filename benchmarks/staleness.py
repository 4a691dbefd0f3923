"""Measure what staleness costs, and how much an off-policy correction improves it.

    python -m benchmarks.staleness --staleness 0 1 2 4 8 --seeds 0 1 2 --steps 50 --output staleness.jsonl

The tiny countdown model is trained with each --max-staleness, with the plain policy gradient (loss `grpo`: no ratio, no
clip), and with truncated importance weights in addition (TIS, bound 2). With --groups-alive, any finished group may
join a step. A step takes 16 groups, so `--staleness 4 --groups-alive 32` has a mean staleness of 1. For each seed, it
prints the held-out accuracy at the end, and the first evaluated step that reached --target. Each result is appended to
--output at once; runs whose results are there are not repeated.
"""

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.runs import countdown_run

ARMS = {
    "none": ("--policy-loss=grpo",),
    "tis": ("--policy-loss=grpo", "--importance-level=token", "--importance-high=2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--groups-alive", type=int, help="default: as many as the bound allows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.35, help="report the first step with this accuracy")
    parser.add_argument("--output", type=Path, default=Path("staleness.jsonl"))
    args = parser.parse_args()
    alive = [] if args.groups_alive is None else [f"--groups-alive={args.groups_alive}"]
    done = {_key(row): row for row in _rows(args.output)}
    for seed in args.seeds:
        for staleness in args.staleness:
            for arm, options in ARMS.items():
                key = (staleness, args.groups_alive, arm, seed)
                # On-policy, every weight is 1, so the correction changes nothing
                if key in done or (staleness == 0 and arm != "none"):
                    continue
                run = countdown_run(
                    f"--max-staleness={staleness}",
                    *options,
                    *alive,
                    seed=seed,
                    steps=args.steps,
                    eval_every=args.eval_every,
                )
                row = {
                    "staleness": staleness,
                    "groups_alive": args.groups_alive,
                    "arm": arm,
                    "seed": seed,
                    "accuracy": run.accuracy(),
                    "staleness_mean": run.mean("staleness_mean"),
                    "mismatch_kl": run.mean("mismatch_kl"),
                    "ess": run.mean("ess"),
                }
                with args.output.open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
                done[key] = row
    _report(list(done.values()), args.target)


def _report(rows: list[dict], target: float) -> None:
    print(
        f"{'S':>2} {'alive':>5} {'correction':>10} {'mean S':>7} {'KL':>8} {'ESS':>6}  "
        f"final accuracy (mean; by seed)  steps to {target}"
    )
    for which in sorted({_key(row)[:3] for row in rows}, key=str):
        chosen = [row for row in rows if _key(row)[:3] == which]
        staleness, alive, arm = which
        finals = [list(row["accuracy"].values())[-1] for row in chosen]
        firsts = [_first(row["accuracy"], target) for row in chosen]
        means = {
            key: statistics.fmean(row[key] for row in chosen)
            for key in ("staleness_mean", "mismatch_kl", "ess")
        }
        print(
            f"{staleness:>2} {alive or '':>5} {arm:>10} {means['staleness_mean']:>7.2f} {means['mismatch_kl']:>8.4f} "
            f"{means['ess']:>6.3f}  "
            f"{statistics.fmean(finals):.3f}; {' '.join(f'{final:.3f}' for final in finals)}   "
            f"{' '.join(map(str, firsts))}"
        )


def _first(accuracy: dict, target: float) -> int | str:
    return next((int(step) for step, value in accuracy.items() if value >= target), "-")


def _key(row: dict) -> tuple[int, int | None, str, int]:
    return row["staleness"], row.get("groups_alive"), row["arm"], row["seed"]


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
