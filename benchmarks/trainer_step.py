"""Measure what a trainer's step costs, without engines and rewards. The micro-batches are prepared before.

    python -m benchmarks.trainer_step demo      # CPU per sample in the demo's setting: 256 short samples a step
    python -m benchmarks.trainer_step lengths   # CPU and memory per token, 1k to 64k packed tokens of 512-token samples

It uses one process and one thread. Seconds are CPU time of the process, which hardly depends on other programs on the
machine. Each command prints one JSON object.
"""

import json
import multiprocessing
import resource
import time
from typing import Annotated, Any

import numpy as np
import torch
import typer

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.data import TINY_MODEL
from async_grpo.messages import MicroBatch
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks, distributed_run
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy
from async_grpo.types import PROMPT_TOKEN

VOCAB = 266  # vocabulary of the demo's model
app = typer.Typer(add_completion=False)
Compile = Annotated[bool, typer.Option(help="Compile the layers, as --torch-compile does.")]


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Measured steps; three more before them are not measured.")] = 12,
    samples: Annotated[int, typer.Option(help="Samples of a step.")] = 256,
    group: Annotated[int, typer.Option(help="Samples with the same prompt.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Token budget of a micro-batch.")] = 4096,
    torch_compile: Compile = False,
) -> None:
    """Measure the CPU time per sample for short samples: about 14 + 12 tokens each."""
    rng = np.random.default_rng(0)
    micro_batches = packed(rng, rng.integers(18, 35, samples).tolist(), max_tokens, group)
    with distributed_run("cpu") as ranks:
        accumulator = make_accumulator(ranks, torch_compile)
        seconds = [step_seconds(accumulator, micro_batches) for _ in range(steps + 3)][3:]
    tokens, milliseconds = sum(len(batch.input_ids) for batch in micro_batches), np.array(seconds) * 1e3
    report(
        samples=samples,
        tokens=tokens,
        micro_batches=len(micro_batches),
        ms_per_sample=float(np.median(milliseconds)) / samples,
        ms_per_sample_best=float(milliseconds.min()) / samples,
        matmul_GFLOP_per_s=matmul_rate() / 1e9,
    )


@app.command()
def lengths(
    sizes: Annotated[str, typer.Option(help="Packed tokens of a micro-batch.")] = "1024,4096,16384,65536",
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 512,
    repeats: Annotated[int, typer.Option(help="Measured steps; the minimum counts.")] = 3,
    torch_compile: Compile = False,
) -> None:
    """Measure CPU and memory per token, each size in a separate process."""
    context, rows = multiprocessing.get_context("spawn"), []
    for size in map(int, sizes.split(",")):
        with context.Pool(1) as pool:
            rows.append(pool.apply(cost_of_size, (size, length, repeats, torch_compile)))
    tokens, memory = (np.array([row[name] for row in rows]) for name in ("tokens", "memory_MB"))
    per_token = np.array([row["us_per_token"] for row in rows])
    slope, start = np.polyfit(tokens, memory, 1)
    report(
        sizes=rows,
        time_spread=float(per_token.max() / per_token.min() - 1),
        memory_KB_per_token=float(slope * 1e3),
        memory_off_line_MB=float(np.abs(memory - slope * tokens - start).max()),
    )


def cost_of_size(size: int, length: int, repeats: int, torch_compile: bool) -> dict[str, Any]:
    """Return the cost of micro-batches with `size` packed tokens.

    A step has so many of them that it has as many tokens as a step with the largest size.
    """
    batch = packed(np.random.default_rng(0), [length] * (size // length), size)
    per_step = max(1, 16_384 // size)
    with distributed_run("cpu") as ranks:
        accumulator = make_accumulator(ranks, torch_compile)
        step_seconds(accumulator, packed(np.random.default_rng(0), [16], 16))
        before = peak_MB()
        seconds = min(step_seconds(accumulator, batch * per_step) for _ in range(repeats + 1))
    tokens = len(batch[0].input_ids)
    return {
        "tokens": tokens,
        "us_per_token": seconds / (tokens * per_step) * 1e6,
        "memory_MB": peak_MB() - before,
    }


def make_accumulator(ranks: Ranks, torch_compile: bool) -> GradientAccumulator:
    torch.set_num_threads(1)
    policy = PolicyModel(load_causal_lm(TINY_MODEL, "float32"))
    config = OptimizerConfig(learning_rate=1e-6, torch_compile=torch_compile)
    policy = shard_policy(policy, ranks, config)
    optimizer, scheduler = build_policy_optimizer(policy, config)
    objective = Objective(AlgorithmConfig(kl_coef=0.001))
    return GradientAccumulator(policy, optimizer, scheduler, objective, ranks, config)


def step_seconds(accumulator: GradientAccumulator, micro_batches: list[MicroBatch]) -> float:
    begun = time.process_time()
    for batch in micro_batches:
        accumulator.add(batch)
    accumulator.finish()
    return time.process_time() - begun


def packed(rng: np.random.Generator, lengths: list[int], max_tokens: int, group: int = 1) -> list[MicroBatch]:
    """Return random samples, half prompt and half completion, in order up to the token budget.

    Every `group` samples have the same prompt.
    """
    micro_batches: list[MicroBatch] = []
    hand: list[int] = []
    for length in [*lengths, max_tokens + 1]:
        if hand and sum(hand) + length > max_tokens:
            micro_batches.append(micro_batch(rng, hand, group))
            hand = []
        hand.append(length)
    return micro_batches


def micro_batch(rng: np.random.Generator, lengths: list[int], group: int) -> MicroBatch:
    prompts = [length // 2 + 1 for length in lengths[::group] for _ in range(group)][: len(lengths)]
    lengths = [max(length, prompt + 1) for length, prompt in zip(lengths, prompts, strict=True)]
    total = sum(lengths)
    ids = [rng.integers(0, VOCAB - 10, length) for length in lengths]
    for i, prompt in enumerate(prompts):
        ids[i][:prompt] = ids[i // group * group][:prompt]
    loss_mask = np.concatenate(
        [np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    )
    logprobs = (-np.log(VOCAB) + 0.1 * rng.normal(size=(2, total))).astype(np.float32)
    return MicroBatch(
        input_ids=np.concatenate(ids).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs[0],
        advantages=np.repeat(rng.normal(size=len(lengths)), lengths).astype(np.float32),
        versions=np.where(loss_mask, 0, PROMPT_TOKEN).astype(np.int32),
        group_ids=np.arange(len(lengths)) // 8,
        group_tokens=np.full(len(lengths), 100),
        ref_logprobs=logprobs[1],
    )


def matmul_rate(size: int = 512) -> float:
    """Return the float32 operations per second of this core in a matrix product."""
    left, right, repeats = torch.randn(4 * size, size), torch.randn(size, size), 40
    left @ right
    begun = time.process_time()
    for _ in range(repeats):
        left @ right
    return 2 * 4 * size**3 * repeats / (time.process_time() - begun)


def peak_MB() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(**figures: Any) -> None:
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    app()
