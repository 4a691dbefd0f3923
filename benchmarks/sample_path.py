"""Measure samples per second and CPU per sample of registry, batcher, pool and packing, in one process without Ray.

    python benchmarks/sample_path.py [--steps 40] [--profile]

The engine is a script that has all completions of a group at once. The rewards are the shipped `countdown` and
`format`. Nothing is trained. So the result is what one sample costs in the controller's process, without messages.
"""

import argparse
import asyncio
import cProfile
import pstats
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import numpy as np

from async_grpo.cluster.registered_workers import GenerationWorkers
from async_grpo.errors import WorkerLost
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig
from async_grpo.experience.dataset import Question
from async_grpo.experience.worker_registry import scheduling_policy
from async_grpo.messages import StepEnd, WorkerInfo
from async_grpo.protocols import WeightPackage
from async_grpo.rewards.builtin import countdown, text
from async_grpo.rewards.inline import InlineReward
from async_grpo.rewards.pool import VerifierPool
from async_grpo.types import Completion, FinishReason

# Groups of a step, members of a group, and tokens of a completion, as in the demo
GROUPS, MEMBERS, TOKENS = 32, 8, 12
REWARDS = {"countdown": countdown.score, "format": text.format}
TEXTS = [
    "3*4</think>\n<answer>3*(4+5)</answer>",
    "</think><answer>3+4</answer>",
    "so</think>\n<answer>5-3*4</answer>",
]


class ScriptedLink:
    """A `WorkerLink` to an engine that answers at once."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version

    async def stream(
        self, _method: str, _prompt: np.ndarray, seeds: dict[int, int], _sampling: None
    ) -> AsyncGenerator[Any]:
        for member in seeds:
            yield Completion(
                np.arange(TOKENS, dtype=np.int32),
                np.full(TOKENS, -1.0, np.float32),
                np.full(TOKENS, self._version(), np.int32),
                FinishReason.STOP,
                TEXTS[member % len(TEXTS)],
                member=member,
            )

    async def call(self, _method: str) -> dict[str, Any]:
        return {"token_timeline": [], "paused_s": 0.0, "busy": []}

    def close(self) -> None:
        """Do nothing, because there is no connection."""


async def run(steps: int) -> tuple[float, float]:
    """Return the (wall, CPU) seconds of this number of steps with 256 samples each."""
    live = 0

    def connect(_handle: Any, _name: str, _on_lost: Callable[[WorkerLost], None]) -> ScriptedLink:
        return ScriptedLink(lambda: live)

    async def make_worker(name: str) -> InlineReward:
        return InlineReward(name, REWARDS[name], {})

    generation = GenerationWorkers(0, 10.0, connect, scheduling_policy("least_loaded"))
    await generation.register(WorkerInfo("scripted", "generation", 512, 1_000_000), None)
    nothing = np.zeros(0, np.int32)
    generation.end_sync(WeightPackage(0, {}, [], nothing, nothing, 1.0), ["scripted"])
    row = {"input": "Reach 27 with 3, 4 and 5.<think>", "nums": [3, 4, 5], "target": 27}
    questions = [Question(np.arange(24, dtype=np.int32), row | {"ordinal": n}) for n in range(200)]
    config = BatchConfig(
        batch_size=GROUPS,
        samples_per_question=MEMBERS,
        num_training_batches=steps,
        max_tokens_per_gpu=4096,
        infinite_sampler_seed=0,
    )
    pool = VerifierPool(tuple(REWARDS), make_worker)
    await pool.start()

    class Verification:  # counts by adapter, as a run does
        verify, post_process, close, start = pool.verify, pool.post_process, pool.close, pool.start

        async def take_stats(self) -> dict[str, Any]:
            return {"verifiers": pool.take_stats()}

    batcher = ExperienceBatcher(config, questions, generation, Verification())
    begun, cpu = time.perf_counter(), time.process_time()
    await batcher.start()
    while live < steps:
        if isinstance(await batcher.next_message(0), StepEnd):
            live += 1
            await batcher.weights_live(live)
    took = time.perf_counter() - begun, time.process_time() - cpu
    await batcher.close()
    await pool.close()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true", help="print the 40 most expensive functions")
    options = parser.parse_args()
    asyncio.run(run(2))  # not measured: imports and first calls
    if options.profile:
        with cProfile.Profile() as profile:
            asyncio.run(run(options.steps))
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    wall_s, cpu_s = asyncio.run(run(options.steps))
    samples = options.steps * GROUPS * MEMBERS
    print(f"{samples} samples: {samples / wall_s:.0f} a second, {1000 * cpu_s / samples:.3f} ms of CPU each")


if __name__ == "__main__":
    main()
