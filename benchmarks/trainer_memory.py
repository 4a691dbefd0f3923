"""Measure the memory of a trainer rank with LoRA and with all weights: one rank on the CPU, the same micro-batches.

    python -m benchmarks.trainer_memory [--model FOLDER] [--rank 16] [--tokens 512] [--length 128] [--four-bits]

Each case runs in a separate process. It loads the model, and takes some steps with the largest micro-batch that the
options allow (`largest_micro_batch`). It prints the largest resident memory, and the same without the memory of the
process before it loaded the model. Loading maps the model's files, which counts as resident memory.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from async_grpo.data import smollm2

STEPS = 6
CASE = """
import dataclasses, json, sys
import numpy as np
import torch
from async_grpo.cluster.policy_kinds import language_rank_bytes, load_language_policy, make_accumulator
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import load_config
from async_grpo.processes.memory_use import peak_resident_bytes, resident_bytes
from async_grpo.training.distributed import distributed_run
from async_grpo.training.largest_trial import largest_micro_batch

options = json.loads(sys.argv[1])
length, steps = int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
config = RunConfig(data_path="x", reward_fns="format", batch_size=100, samples_per_question=10, **options)
vocab_size = load_config(config.model_name_or_path).vocab_size
settings = SharedRunSettings("x", "", vocab_size, "float32", 1.0, (3,), length, length, "object_store", (), 0)
settings = dataclasses.replace(settings, lora=lora_settings(config, config.model_name_or_path))
with distributed_run("cpu", timeout_s=300) as ranks:
    before = resident_bytes()
    policy = load_language_policy(config, settings, ranks)
    loaded = peak_resident_bytes()
    accumulator = make_accumulator(config, settings, policy, ranks)
    batch = largest_micro_batch(config, vocab_size, length)
    batch = dataclasses.replace(batch, advantages=np.ones_like(batch.advantages))
    for _ in range(steps):
        accumulator.add(batch)
        accumulator.finish()
    planned = language_rank_bytes(config, settings, policy, ranks)
    print(json.dumps({"before": before, "loaded": loaded, "peak": peak_resident_bytes(), "planned": planned}))
import os, sys
sys.stdout.flush()
os._exit(0)
"""


def measure(options: dict[str, Any], length: int) -> dict[str, float]:
    """Return the memory of a case in GB: before the model, after loading, at the peak, and as planned."""
    command = [sys.executable, "-c", CASE, json.dumps(options), str(length), str(STEPS)]
    output = subprocess.run(command, check=True, timeout=900, stdout=subprocess.PIPE, text=True).stdout
    return {name: number / 1e9 for name, number in json.loads(output.splitlines()[-1]).items()}


def main() -> None:
    """Measure both cases, and print them with their ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, help="folder of the model; by default SmolLM2-135M-Instruct")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--four-bits", action="store_true", help="measure a base in 4 bits, too")
    args = parser.parse_args()
    model = args.model or smollm2.cached_smollm2()
    options = {
        "model_name_or_path": str(model),
        "max_tokens_per_gpu": args.tokens,
        "gradient_checkpointing": args.checkpointing,
    }
    whole = measure(options, args.length)
    adapter = measure(options | {"lora_rank": args.rank}, args.length)
    cases = {"all weights": whole, f"LoRA, rank {args.rank}": adapter}
    if args.four_bits:
        in_four_bits = {"lora_rank": args.rank, "load_in_4bit": True}
        cases["base in 4 bits"] = measure(options | in_four_bits, args.length)
    print("GB: before the model, largest while loading, peak, planned")
    for name, case in cases.items():
        print(
            f"{name:<16} " + " ".join(f"{case[key]:.2f}" for key in ("before", "loaded", "peak", "planned"))
        )
    added = (adapter["peak"] - adapter["before"]) / (whole["peak"] - whole["before"])
    print(
        f"LoRA / all weights: {adapter['peak'] / whole['peak']:.2f} as it is, {added:.2f} without the start"
    )


if __name__ == "__main__":
    main()
