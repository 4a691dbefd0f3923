"""`async-grpo demo`: train the tiny model on countdown with the real Ray, engine and trainer, without a GPU."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from async_grpo.data import (
    COUNTDOWN_HELDOUT,
    COUNTDOWN_TRAIN,
    GUESS_HELDOUT,
    GUESS_MODEL,
    GUESS_TRAIN,
    TINY_MODEL,
)
from async_grpo.launch.check import check, refuse_without_vllm
from async_grpo.launch.early_start import early_start
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.local_run import start
from async_grpo.metrics.console import show_times
from async_grpo.metrics.writer import EVAL_FILE, METRICS_FILE, claim
from async_grpo.observe.samples import SamplesConfig, write_samples_page
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option

COUNTDOWN = "countdown"
GUESS = "guess"
TASKS: dict[str, dict[str, Any]] = {
    COUNTDOWN: {
        "model_name_or_path": str(TINY_MODEL),
        "data_path": str(COUNTDOWN_TRAIN),
        "eval_data_path": str(COUNTDOWN_HELDOUT),
        "reward_fns": "countdown,format",
        "max_tokens_per_gpu": 4096,
        "max_generation_tokens": 24,
        "learning_rate": 2e-4,
        "kl_coef": 0.001,
    },
    GUESS: {
        "model_name_or_path": str(GUESS_MODEL),
        "data_path": str(GUESS_TRAIN),
        "eval_data_path": str(GUESS_HELDOUT),
        "eval_samples": 2,
        "environment": "guess",
        "max_tokens_per_gpu": 8192,
        "max_generation_tokens": 100,  # limit of all turns together, including the game's replies
        "max_turn_tokens": 6,
        "learning_rate": 1.5e-3,
    },
}
# A folder with a file of this name belongs to a demo, and the next demo may empty it
MARK = ".async-grpo-demo"


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Section):
    """Options of `async-grpo demo`."""

    seed: int = option(37, "Seed of all random choices.", "Demo")
    output_dir: str = option("runs/demo", "Folder of the demo; an earlier demo in it is replaced.", "Demo")
    environment: str = option(
        COUNTDOWN,
        "Task: countdown (one answer per question) or guess (a game of several turns).",
        "Demo",
        choices=tuple(TASKS),
    )
    steps: int = option(90, "Number of optimizer steps.", "Demo", range=POSITIVE)
    max_staleness: int = option(
        1,
        "Largest number of optimizer steps between the policy that generated a token and the policy that trains on it; "
        "0 trains on-policy.",
        "Demo",
        range=NOT_NEGATIVE,
    )


def demo(config: DemoConfig) -> None:
    """Train the model, evaluate it before and after, and write pictures, samples and a checkpoint.

    Raises:
        AsyncGrpoError: The run failed; see `run_locally`.
    """
    from async_grpo.observe.plot import plot

    start_time = time.monotonic()
    folder = Path(config.output_dir)
    run = LocalConfig(
        output_dir=config.output_dir,
        run_name=f"demo-{config.seed}",
        batch_size=32,
        samples_per_question=8,
        num_training_batches=config.steps,
        max_staleness=config.max_staleness,
        infinite_sampler_seed=config.seed,
        num_warmup_steps=5,
        nproc_per_node=2,
        enforce_eager=True,
        min_samples_per_checkpoint=10_000_000,
        eval_pinned=True,
        resume="never",  # this demo replaces an earlier one
        **TASKS[config.environment],
    )
    refuse_without_vllm()
    with early_start(run) as early:
        check(run, early)  # a wrong option must be refused before `claim` removes an earlier demo
        claim(folder, mark=MARK)
        start(run, early)
    keys = ["avg_reward", "avg_max_reward_in_group", "avg_output_tokens", "staleness_mean"]
    for picture in ("reward.svg", "reward.png"):
        plot([folder / METRICS_FILE], keys, smooth=True, output=folder / picture)
    _print_results(folder, time.monotonic() - start_time)


def _print_results(folder: Path, seconds: float) -> None:
    console = Console()
    evaluations = [json.loads(line) for line in (folder / EVAL_FILE).read_text().splitlines()]
    before = evaluations[0]
    after = evaluations[-1]
    console.print(f"{before['eval_num_samples']} held-out tasks, temperature 1:")
    table = Table("", "before", "after")
    for label, key in (("accuracy", "eval_countdown/answer_reward"), ("mean reward", "eval_avg_reward")):
        if before.get(key) is not None and after.get(key) is not None:
            table.add_row(label, f"{before[key]:.3f}", f"{after[key]:.3f}")
    console.print(table)
    page = folder / "samples.html"
    write_samples_page(SamplesConfig(path=str(folder), output=str(page), evaluation=True))
    checkpoint = max((folder / "hf_format").iterdir(), key=lambda path: path.stat().st_mtime)
    results = {
        "reward curve": f"{folder / 'reward.svg'} and .png",
        "metrics": folder / METRICS_FILE,
        "checkpoint": checkpoint,
        "logs": folder / "logs",
    }
    for label, place in results.items():
        console.print(f"{label}: {place}", soft_wrap=True, highlight=False)
    console.print(f"{seconds:.0f} s in all")
    show_times(folder)
    console.print(f"samples before and after: {page}", soft_wrap=True, highlight=False)
