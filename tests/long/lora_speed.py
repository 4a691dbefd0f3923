"""Tokens per CPU second of an engine that applies an adapter (LoRA), beside an engine without one.

    python -m tests.long.lora_speed [--model FOLDER] [--dtype float32] [--rank 16] [--sequences 64] [--tokens 64]

CPU seconds of all processes of the engine and of its worker are counted, because other work may share the machine. The
engines take turns, in many short rounds. Other work makes each CPU second worth less, so the fastest rounds tell most.
"""

import argparse
import os
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from engine_thread import CANARY, MODEL, EngineThread
from peft_adapters import lora_settings, new_adapter, peft_tensors
from safetensors.torch import save
from warm_servers import VARIABLES

from async_grpo.types import Completion, Sampling

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROUNDS = 40


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU seconds, user and system, that these processes have used."""
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


async def generate(engine: EngineThread, sequences: int, tokens: int, seed: int) -> int:
    """Generate from prompts of 8 tokens, and return the number of tokens."""
    seeds = {member: seed + member for member in range(sequences)}
    answers = engine.worker.complete(CANARY[:8], seeds, Sampling(max_tokens=tokens))
    return sum([len(answer) async for answer in answers if isinstance(answer, Completion)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    os.environ.update(VARIABLES)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    policy = new_adapter(model, options.rank, 2.0, TARGETS, size=0.02)
    lora = lora_settings(policy, options.rank, 2.0)
    own = psutil.Process()
    with ExitStack() as stack:
        engines, processes = {}, {}
        for name, changes in {"without": {}, "with": {"lora": lora}}.items():
            before = set(own.children(recursive=True))
            settings = {"dtype": options.dtype, "stop_token_ids": (), "char_ends": False} | changes
            engines[name] = stack.enter_context(closing(EngineThread(options.model, **settings)))
            processes[name] = [own, *(set(own.children(recursive=True)) - before)]
        image = save(peft_tensors(policy, getattr(torch, options.dtype)))
        worker = engines["with"].worker
        for version in range(5):
            worker.progress()
            engines["with"].run(worker.update(version, [memoryview(image)]))
            paused_ms = 1000 * worker.progress()["paused_s"]
            print(f"sync {version}: {len(image) / 1e6:.2f} MB, engine paused {paused_ms:.0f} ms", flush=True)
        rates = {name: [] for name in engines}
        for number in range(ROUNDS + 1):
            for name, engine in engines.items():
                begin = cpu_seconds(processes[name])
                count = engine.run(generate(engine, options.sequences, options.tokens, 1000 * number), 600)
                if number:  # the first round also warms up
                    rates[name].append(count / (cpu_seconds(processes[name]) - begin))
        for share in (0.5, 0.75, 0.9):
            without, with_adapter = (np.quantile(rates[name], share) for name in ("without", "with"))
            print(
                f"quantile {share}: {without:.0f} tokens per CPU second without an adapter, {with_adapter:.0f} with it: "
                f"{without / with_adapter:.3f} x"
            )


if __name__ == "__main__":
    main()
