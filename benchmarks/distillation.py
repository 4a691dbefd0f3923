"""Distil a trained tiny model into an untrained one, and measure the exact KL divergence before and after.

    python -m benchmarks.distillation --teacher runs/demo/hf_format/samples_N

The teacher is a model that `scripts/demo` has trained (or any other folder with the same vocabulary); the student is the
model with which the demo begins, or with --from-scratch the same model with random weights. The run is `--recipe opd`: no
reward is computed. The KL per token is exact: over the whole vocabulary, at each token of completions that the student
samples for held-out questions.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.data import COUNTDOWN_HELDOUT, COUNTDOWN_TRAIN, TINY_MODEL

NUM_QUESTIONS = 64
NUM_COMPLETIONS = 8  # completions of each question
MAX_TOKENS = 24


def questions() -> list[str]:
    """Return the texts of held-out questions."""
    lines = COUNTDOWN_HELDOUT.read_text().splitlines()[:NUM_QUESTIONS]
    return [json.loads(line)["input"] for line in lines]


@torch.no_grad()
def exact_kl(student_folder: Path, teacher_folder: Path) -> float:
    """Return the mean KL(student || teacher) per token, in nats, over completions that the student samples."""
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_pretrained(student_folder, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    stop_ids = set(torch.tensor(student.generation_config.eos_token_id).flatten().tolist())
    total = 0.0
    num_tokens = 0
    for text in questions():
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        sequences = student.generate(
            prompt, do_sample=True, num_return_sequences=NUM_COMPLETIONS, max_new_tokens=MAX_TOKENS, top_k=0
        )
        first = prompt.shape[1]
        logprobs = student(sequences).logits[:, first - 1 : -1].log_softmax(-1)
        teacher_logprobs = teacher(sequences).logits[:, first - 1 : -1].log_softmax(-1)
        kl = (logprobs.exp() * (logprobs - teacher_logprobs)).sum(-1)
        for row, token_ids in zip(kl, sequences[:, first:].tolist(), strict=True):
            ends = [place + 1 for place, token_id in enumerate(token_ids) if token_id in stop_ids]
            length = ends[0] if ends else len(token_ids)
            total += row[:length].sum().item()
            num_tokens += length
    return total / num_tokens


def untrained(folder: Path, seed: int) -> Path:
    """Write the tiny model with random weights into a folder."""
    shutil.copytree(TINY_MODEL, folder, dirs_exist_ok=True)
    torch.manual_seed(seed)
    config = AutoModelForCausalLM.from_pretrained(TINY_MODEL).config
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def distil(student: Path, arguments: argparse.Namespace) -> tuple[Path, list[dict[str, Any]]]:
    """Run the distillation, and return the folder of the trained student and the lines of the metrics."""
    output = Path(arguments.output_dir) / "run"
    options = {
        "recipe": "opd",
        "teacher": arguments.teacher,
        "model-name-or-path": student,
        "data-path": COUNTDOWN_TRAIN,
        "output-dir": output,
        "run-name": f"distillation-{arguments.seed}",
        "resume": "never",
        "batch-size": arguments.batch_size,
        "samples-per-question": 8,
        "teacher-top-k": arguments.top_k,
        "num-training-batches": arguments.steps,
        "learning-rate": arguments.learning_rate,
        "num-warmup-steps": 5,
        "max-generation-tokens": MAX_TOKENS,
        "max-tokens-per-gpu": 4096,
        "infinite-sampler-seed": arguments.seed,
    }
    command = [sys.executable, "-m", "async_grpo", "run", "--enforce-eager"]
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (output / "training_metrics.jsonl").read_text().splitlines()]
    (model,) = (output / "hf_format").glob("samples_*")
    return model, lines


def main() -> None:
    """Run the distillation and print what it reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--output-dir", default="runs/distillation")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--batch-size", type=int, default=32, help="questions per step, of 8 completions each"
    )
    parser.add_argument("--top-k", type=int, default=0, help="see --teacher-top-k of a run")
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--from-scratch", action="store_true")
    arguments = parser.parse_args()
    folder = Path(arguments.output_dir)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    student = untrained(folder / "student", arguments.seed) if arguments.from_scratch else TINY_MODEL
    before = exact_kl(student, Path(arguments.teacher))
    begin = time.monotonic()
    model, lines = distil(student, arguments)
    seconds = time.monotonic() - begin
    after = exact_kl(model, Path(arguments.teacher))
    for line in (lines[0], lines[len(lines) // 2], lines[-1]):
        print(f"step {line['step']}: teacher_kl {line['teacher_kl']:.4f} k3 {line['teacher_kl_k3']:.4f}")
    print(f"exact KL per token: {before:.4f} -> {after:.4f} nats, a factor of {before / after:.1f}")
    print(f"{seconds:.0f} s, {len(lines)} steps")


if __name__ == "__main__":
    main()
