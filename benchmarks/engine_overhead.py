"""Measure what this library's worker adds to vLLM: the same requests to `AsyncLLM` and to `GenerationWorker.complete`.

    python -m benchmarks.engine_overhead                    case a: the tiny countdown model, 256 requests of ~12 tokens
    python -m benchmarks.engine_overhead --case e           30 M random parameters, 64 requests of 256 tokens
    python -m benchmarks.engine_overhead --actor            also through a Ray actor and its channel, with a second engine

Both use the same engine in one process, in turns, so that a slow machine slows both down. CPU time is user and system
time of this process (vLLM's front end, and what the worker adds) and of vLLM's own processes.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from async_grpo.cluster.channel import Channel
from async_grpo.cluster.ray_session import forwarded_environment, zero_cpu_actor
from async_grpo.cluster.worker_actors import ENGINE_ENVIRONMENT, GenerationActor
from async_grpo.config.run import WorkerConfig
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling.load import model_fingerprint, stop_token_ids

ROOT = Path(__file__).resolve().parent.parent
TINY_MODEL = ROOT / "sample-data" / "tiny-model"
GROUP_SIZE = 8
SEEDS = {member: member for member in range(GROUP_SIZE)}
# Takes a prompt, and returns the number of tokens of the group's completions
Ask = Callable[[np.ndarray], Awaitable[int]]


def model_of_case_e(folder: Path) -> Path:
    """Make a model with about 30 M random parameters and no end token, so that every completion has its maximum length."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    config = Qwen2Config(vocab_size=266, max_position_embeddings=1024, **shape, **heads)
    config.eos_token_id = None
    Qwen2ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_MODEL / name).read_bytes())
    return folder


def settings_of(model: Path, completion_tokens: int) -> SharedRunSettings:
    return SharedRunSettings(
        run_name="engine-overhead",
        model_fingerprint=model_fingerprint(model),
        vocab_size=266,
        dtype="float32",
        temperature=1.0,
        stop_token_ids=stop_token_ids(model) if model == TINY_MODEL else (),
        max_total_tokens=completion_tokens + 32,
        max_completion_tokens=completion_tokens,
        transport="object_store",
        logprob_roles=(),
        seed=0,
    )


def prompts_of(count: int, seed: int) -> list[np.ndarray]:
    lines = (ROOT / "sample-data" / "countdown_train.jsonl").read_text().splitlines()
    chosen = np.random.default_rng(seed).choice(len(lines), count, replace=False)
    return [np.asarray(json.loads(lines[number])["input_token_ids"], np.int32) for number in chosen]


def bare(worker: Any) -> Ask:
    """Return a function that sends one request per member directly to vLLM.

    The prompts have the form that vLLM takes without a thread, which the worker also uses.
    """
    from vllm.inputs import tokens_input

    from async_grpo.inference.requests import EngineRequest

    numbers = itertools.count()

    async def request(prompt: np.ndarray) -> int:
        inputs = tokens_input(prompt.tolist())
        params = EngineRequest.of(worker.settings, prompt, 0, 0).params
        async for output in worker.engine.generate(inputs, params, f"bare-{next(numbers)}"):
            final = output
        return len(final.outputs[0].token_ids)

    async def ask(prompt: np.ndarray) -> int:
        return sum(await asyncio.gather(*[request(prompt) for _ in range(GROUP_SIZE)]))

    return ask


def ours(worker: Any) -> Ask:
    async def ask(prompt: np.ndarray) -> int:
        return sum([len(completion.token_ids) async for completion in worker.complete(prompt, SEEDS)])

    return ask


def through_actor(channel: Channel) -> Ask:
    async def ask(prompt: np.ndarray) -> int:
        stream = channel.stream("complete", prompt, SEEDS)
        return sum([len(completion.token_ids) async for completion in stream])

    return ask


def cpu_of(root: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds that a process and its descendants have used so far, by name."""
    found = {"front end": sum(root.cpu_times()[:2])}
    for child in root.children(recursive=True):
        try:
            words = " ".join([child.name(), *child.cmdline()])
            name = next((w for w in ("EngineCore", "Worker", "GenerationActor") if w in words), "other")
            found[name] = found.get(name, 0.0) + sum(child.cpu_times()[:2])
        except psutil.Error:
            continue
    return found


async def round_of(ask: Ask, prompts: list[np.ndarray]) -> dict[str, float]:
    """Return wall time, and CPU time by process, in milliseconds per completion; and tokens per completion."""
    me = psutil.Process()
    before, begun = cpu_of(me), time.perf_counter()
    tokens = sum(await asyncio.gather(*[ask(prompt) for prompt in prompts]))
    seconds, after = time.perf_counter() - begun, cpu_of(me)
    samples = len(prompts) * GROUP_SIZE
    spent = {name: 1000 * (after[name] - before.get(name, 0.0)) / samples for name in after}
    return {"wall": 1000 * seconds / samples, "tokens": tokens / samples, **spent, "cpu": sum(spent.values())}


@asynccontextmanager
async def actor_channel(config: WorkerConfig, settings: SharedRunSettings) -> AsyncIterator[Channel]:
    """Yield the channel to a generation actor like that of a run, with a second engine."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    environment = {**ENGINE_ENVIRONMENT, **forwarded_environment()}
    actor = zero_cpu_actor(GenerationActor, runtime_env={"env_vars": environment}).remote()
    try:
        await actor.start.remote(config, settings)
        channel = Channel(actor, "generation")
        yield channel
        channel.close()
        await actor.close.remote()
    finally:
        ray.shutdown()


async def measure(options: argparse.Namespace, model: Path, tokens: int) -> dict[str, list[dict[str, float]]]:
    from async_grpo.inference.generation_worker import GenerationWorker

    questions = options.questions or (32 if options.case == "a" else 8)
    config = WorkerConfig(
        mode="generation",
        model_path=str(model),
        max_num_seqs=options.max_num_seqs or questions * GROUP_SIZE,
        enforce_eager=not options.compile,
        engine_options=options.engine_options,
    )
    settings = settings_of(model, tokens)
    found: dict[str, list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        worker = GenerationWorker.start(config, settings)
        stack.callback(worker.close)
        ways = {"bare": bare(worker), "ours": ours(worker)}
        if options.actor:
            ways["actor"] = through_actor(await stack.enter_async_context(actor_channel(config, settings)))
        for ask in ways.values():
            await round_of(ask, prompts_of(questions, 0))
        rounds = options.rounds or (8 if options.case == "a" else 3)
        for number in range(1, rounds + 1):
            for name, ask in ways.items():
                found.setdefault(name, []).append(await round_of(ask, prompts_of(questions, number)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=("a", "e"), default="a")
    parser.add_argument("--rounds", type=int, help="rounds of each way; by default 8 in case a, 3 in case e")
    parser.add_argument("--questions", type=int)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--engine-options", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--actor", action="store_true")
    options = parser.parse_args()
    for name, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        model, tokens = (TINY_MODEL, 24) if options.case == "a" else (model_of_case_e(Path(folder)), 256)
        found = asyncio.run(measure(options, model, tokens))
    for way, rounds in found.items():
        medians = {name: statistics.median(one.get(name, 0.0) for one in rounds) for name in rounds[0]}
        print(f"{way:6}", "  ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    for what in ("wall", "cpu"):
        ratios = [one[what] / other[what] for one, other in zip(found["ours"], found["bare"], strict=True)]
        print(
            f"ours / bare, {what}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
