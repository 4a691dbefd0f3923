"""Make one measurement of one side: start the side as a user would, and read its results from its files."""

import json
import os
import re
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.experience.dataset import PromptCursor, Question
from benchmarks.against_trl.cases import REWARDS, ROOT, Case
from benchmarks.control_plane import MARK, cpu_seconds, lines

TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Place:
    """The folder in which a measurement is made, and the Pythons of the two sides."""

    folder: Path
    model: Path
    ours: Path
    trl: Path
    cores: int


@dataclass(frozen=True)
class Steps:
    """The steps of a run: the Unix time at the end of each step, and the tokens and mean rewards by step."""

    begun: float
    ends: list[float]
    tokens: list[float]
    rewards: list[float]
    cpu_by_kind: dict[str, float]  # CPU seconds during the measured steps, by kind of process
    further: dict[str, Any]


def measure(arm: str, case: Case, seed: int, place: Place, further: list[str]) -> dict[str, Any]:
    """Return the results of one run.

    Raises:
        RuntimeError: The run failed. The message contains the end of its output.
    """
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    command = trl_command(case, seed, place) if arm == "TRL" else our_command(arm, case, seed, place, further)
    run = trl if arm == "TRL" else ours
    steps = run(command, case, place)
    first, last = case.warm_up, case.warm_up + case.steps
    window = steps.ends[last - 1] - steps.ends[first - 1]
    samples = case.samples * case.steps
    return {
        "command": " ".join(["python", *command[1:]]).replace(f"{ROOT}/", ""),
        "first_step_s": steps.ends[0] - steps.begun,
        "window_s": window,
        "samples_per_s": samples / window,
        "tokens_per_s": sum(steps.tokens[first:last]) / window,
        "tokens_per_sample": sum(steps.tokens[first:last]) / samples,
        "step_s": [b - a for a, b in zip(steps.ends[first - 1 : last], steps.ends[first:last], strict=False)],
        "cpu_ms_per_sample": {kind: 1000 * spent / samples for kind, spent in steps.cpu_by_kind.items()},
        "reward": statistics.fmean(steps.rewards[first:last]),
        "ends_s": [end - steps.begun for end in steps.ends],
        **steps.further,
    }


def our_command(arm: str, case: Case, seed: int, place: Place, further: list[str]) -> list[str]:
    staleness, steps_alive = map(int, [*re.findall(r"\d+", arm), "0"][:2])
    total = (
        case.warm_up + case.steps + staleness + 1
    )  # during the last steps nothing new is generated, so they are not measured
    reward = "countdown" if case.reward == "shipped" else f"{REWARDS}:{case.reward}"
    alive = (steps_alive or staleness + 1) * case.samples
    return [
        *[str(place.ours), "-m", "async_grpo", "run", f"--output-dir={place.folder / 'run'}"],
        *[
            f"--run-name={place.folder.name}",
            f"--model-name-or-path={place.model}",
            f"--data-path={case.train}",
        ],
        *[f"--reward-fns={reward}", f"--batch-size={case.prompts}", f"--samples-per-question={case.group}"],
        *[f"--num-training-batches={total}", f"--max-generation-tokens={case.max_tokens}"],
        *[f"--max-tokens-per-gpu={case.tokens_per_call}", f"--max-staleness={staleness}", "--enforce-eager"],
        *[f"--learning-rate={case.learning_rate}", "--lr-scheduler=constant"],
        f"--infinite-sampler-seed={seed}",
        f"--min-samples-per-checkpoint={case.checkpoint_every * case.samples or 10**9}",
        *(
            # A process of an async reward takes 64 samples at once
            [f"--verifiers-per-reward={-(-(case.calls or alive) // 64)}"]
            if case.reward in ("slow", "judge")
            else []
        ),
        *([] if case.mask_truncated else ["--no-mask-truncated"]),
        *([f"--groups-alive={steps_alive * case.prompts}"] if steps_alive else []),
        *([f"--lora-rank={case.lora_rank}"] if case.lora_rank else []),
        *further,
    ]


def ours(command: list[str], case: Case, place: Place) -> Steps:
    first, last = case.warm_up, case.warm_up + case.steps
    metrics, console = place.folder / "run" / "training_metrics.jsonl", place.folder / "console.txt"
    environment = {**os.environ, MARK: place.folder.name, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    begun = time.time()
    with console.open("w") as file:
        run = subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=ROOT)
    spent: list[dict[tuple[int, str], float]] = []
    try:
        for count in (first, last):
            while run.poll() is None and _count(metrics) < count:
                _in_time(begun, command)
                time.sleep(0.05)
            spent.append(cpu_seconds(place.folder.name))
        run.wait(TIMEOUT_S)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)
    if run.returncode:
        raise RuntimeError(f"ours ended with code {run.returncode}:\n{console.read_text()[-2000:]}")
    by_kind: dict[str, float] = defaultdict(float)
    for key, total in spent[1].items():
        by_kind[key[1]] += total - spent[0].get(key, 0.0)
    found = lines(metrics)
    for line in found:
        # A failed reward is quick, so the measurement would be wrong
        if line["num_reward_ok"] != line["samples_in_batch"]:
            raise RuntimeError(f"step {line['step']} has rewards for {line['num_reward_ok']} samples only")
    return Steps(
        begun,
        [line["timestamp"] for line in found],
        [line["avg_output_tokens"] * line["samples_in_batch"] for line in found],
        [line["avg_reward"] for line in found],
        dict(by_kind),
        {
            "staleness_mean": statistics.fmean(line["staleness_mean"] for line in found[first:last]),
            "checkpoints": {
                round(int(path.name.rpartition("_")[2]) / case.samples): str(path)
                for path in (place.folder / "run" / "hf_format").glob("samples_*")
                if case.checkpoint_every
            },
        },
    )


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _in_time(begun: float, command: list[str]) -> None:
    if time.time() - begun > TIMEOUT_S:
        raise RuntimeError(f"no end after {TIMEOUT_S:.0f} s: {' '.join(command)}")


def trl_command(case: Case, seed: int, place: Place) -> list[str]:
    settings = {
        **asdict(case),
        "steps": case.warm_up + case.steps,
        "model": str(place.model),
        "data": str(case.train),
        "questions": question_order(case, seed),
        "seed": seed,
        "cores": place.cores,
    }
    (place.folder / "settings.json").write_text(json.dumps(settings))
    answer = place.folder / "answer.json"
    return [
        *[str(place.trl), "-m", "benchmarks.against_trl.trl_side"],
        *[str(place.folder / "settings.json"), str(answer)],
    ]


def question_order(case: Case, seed: int) -> list[int]:
    """Return the rows of the task in the order in which this library draws them, so that TRL gets the same.

    The first step of SmolLM2 trains 8 of 34 questions. With other questions on the two sides, chance would part them.
    """
    num_rows = len(case.train.read_text().splitlines())
    no_tokens = np.zeros(0, np.int32)
    cursor = PromptCursor([Question(no_tokens, {"number": number}) for number in range(num_rows)], seed)
    num_drawn = (case.warm_up + case.steps) * case.prompts
    return [next(cursor).row["number"] for _ in range(num_drawn)]


def trl(command: list[str], case: Case, place: Place) -> Steps:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(place.cores),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    console, begun = place.folder / "console.txt", time.time()
    with console.open("w") as file:
        run = subprocess.run(
            command, stdout=file, stderr=file, env=environment, cwd=ROOT, timeout=TIMEOUT_S, check=False
        )
    if run.returncode:
        raise RuntimeError(f"TRL ended with code {run.returncode}:\n{console.read_text()[-2000:]}")
    found = json.loads((place.folder / "answer.json").read_text())
    first, last = case.warm_up, case.warm_up + case.steps
    return Steps(
        begun,
        found["ends"],
        found["tokens"],
        found["rewards"],
        {"TRL": found["cpu"][last - 1] - found["cpu"][first - 1]},
        {
            "length_quantiles": found["length_quantiles"],
            "length_max": found["length_max"],
            "checkpoints": {
                int(path.name.rpartition("_")[2]): str(path) for path in place.folder.glob("step_*")
            },
        },
    )
