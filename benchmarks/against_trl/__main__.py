"""Compare the speed of this library with TRL's GRPOTrainer on this machine: `scripts/bench`.

    scripts/bench                                    every case, 5 repetitions, the two sides in turn
    scripts/bench --case short --repetitions 3       one case
    scripts/bench --quick                            one repetition of few steps, to see whether everything runs
    scripts/bench --report                           write the table and the picture from the results

Each result is written as a line of JSON at once. If the program was interrupted, the next start measures what is
missing. Options that are unknown here are passed to `async-grpo run`. Give them a name with --label, because they would
otherwise count as repetitions of the default options.
"""

import argparse
import dataclasses
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.against_trl import report, rewards
from benchmarks.against_trl.cases import CASES, ROOT, Case
from benchmarks.against_trl.models import model_folder
from benchmarks.against_trl.sides import Place, measure


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", nargs="+", choices=CASES, help="default: all but short-own")
    parser.add_argument("--arm", nargs="+", help="only these arms: TRL, 'ours S=1', ...")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, help="measured steps of each run (default: the case's)")
    parser.add_argument(
        "--quick", action="store_true", help="one repetition, which measures 2 steps after the first"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first repetition")
    parser.add_argument(
        "--label",
        default="",
        help="name of these measurements; only those without a name are reported",
    )
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "bench" / "results.jsonl")
    parser.add_argument("--report", action="store_true", help="write docs/benchmarks.md's table and picture")
    options, further = parser.parse_known_args()
    options.label = options.label or "quick" * options.quick
    if (options.steps or options.seed or further) and not options.label:
        parser.error("what is measured with other options than the defaults needs a --label")
    return options, further


def plan(options: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[tuple[str, Case, str, int]]:
    """Yield (case's name, case, arm, repetition) for everything that is not measured yet.

    The sides take turns at being first.
    """
    known = {report.key(row) for row in done}
    names = options.case or [name for name in CASES if name != "short-own"]
    for repetition in range(1 if options.quick else options.repetitions):
        for name in names:
            case = CASES[name]
            if options.quick:
                case = dataclasses.replace(
                    case, steps=2, warm_up=1, checkpoint_every=min(case.checkpoint_every, 1)
                )
            if options.steps:
                case = dataclasses.replace(case, steps=options.steps)
            if case.repetitions and repetition >= case.repetitions:
                continue
            for arm in case.arms[:: -1 if repetition % 2 else 1]:
                if (not options.arm or arm in options.arm) and (
                    options.label,
                    name,
                    arm,
                    repetition,
                ) not in known:
                    yield name, case, arm, repetition


def accuracies(case: Case, checkpoints: dict[int, str]) -> dict[int, float]:
    """Return for each step the fraction of held-out tasks that its checkpoint solves at temperature 1.

    Both sides are sampled in the same way, by transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from benchmarks.against_trl.heldout import sample_tasks

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(next(iter(checkpoints.values())))
    rows = [json.loads(line) for line in case.heldout.read_text().splitlines()]
    for row in rows:
        if "input_token_ids" not in row:
            row["input_token_ids"] = tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, return_dict=False
            )
    found = {}
    for step, folder in sorted(checkpoints.items()):
        # The same random numbers for each checkpoint make differences between checkpoints less noisy
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        solved = [
            is_solved(case, row, text)
            for row, texts in sample_tasks(model, tokenizer, rows, case.max_tokens, case.heldout_completions)
            for text in texts
        ]
        found[step] = sum(solved) / len(solved)
        goal = found[0] + case.gain if case.gain is not None else case.accuracy
        if goal is not None and found[step] >= goal and not case.lora_rank:
            break
    return found


def is_solved(case: Case, row: dict[str, Any], completion: str) -> float:
    """Return 1 if the completion solves the held-out task, else 0."""
    from examples.plain_grpo import score

    if case.task == "countdown":
        return score(completion, row)[0]
    return rewards.named(row | {"completion": completion})


def main() -> None:
    # Raise SystemExit at SIGTERM, so that the running side is ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options, further = arguments()
    rows = report.read(options.output)
    if options.report:
        report.write(rows)
        return
    if not options.trl_python.exists():
        sys.exit(f"no {options.trl_python}: start this by scripts/bench, or set --trl-python")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    todo = list(plan(options, rows))
    minutes = sum(case.minutes / len(case.arms) for _, case, _, _ in todo)
    print(f"{len(todo)} runs, about {minutes:.0f} minutes; results in {options.output}", flush=True)
    for number, (name, case, arm, repetition) in enumerate(todo, 1):
        print(f"{number}/{len(todo)} {name}, {arm}, repetition {repetition + 1}:", end=" ", flush=True)
        cache = options.output.parent / "models"
        cache.mkdir(exist_ok=True)
        place = Place(
            folder=options.output.parent / "work" / f"{name}-{re.sub('[ =,]', '', arm)}",
            model=model_folder(case.model, cache),
            ours=Path(sys.executable),
            trl=options.trl_python,
            cores=len(os.sched_getaffinity(0)),
        )
        load, begun = os.getloadavg()[0], time.time()
        found = measure(arm, case, options.seed + repetition, place, further)
        if case.checkpoint_every:
            found["accuracy"] = accuracies(case, {0: str(place.model)} | found.pop("checkpoints"))
        row = {
            "label": options.label,
            "case": name,
            "arm": arm,
            "repetition": repetition,
            "commit": commit(),
            "machine": f"{place.cores} cores, {platform.machine()}",
            "load_before": load,
            "began": begun,
            "seconds": time.time() - begun,
            "samples_per_step": case.samples,
            **found,
        }
        line = json.dumps(row)
        with options.output.open("a") as file:
            file.write(line + "\n")
        # Read the result back from JSON, as a later start does: the steps, which are keys, become texts
        row = json.loads(line)
        rows.append(row)
        print(report.one_line(row), flush=True)
    print(report.table([row for row in rows if row["label"] == options.label]))


def commit() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
