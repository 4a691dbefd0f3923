"""Measure memory and CPU of a controller with a thousand workers and a hundred thousand samples in flight.

    python -m benchmarks.many_workers
    python -m benchmarks.many_workers --workers 64 --groups 100 --steps 6

Controller, registry and batcher are real. Engines, rewards and trainer only wait. Time is virtual while everything
waits. While the controller works, time advances by the CPU time that it uses, as on one core. Lengths are log-normal.

The result is compared with a bound: the time that the same lengths would take with the same staleness if the controller
took no time. With P groups per step and staleness S, group i is admitted when step i // P - S - 1 is live. Step k
begins when its groups are complete and step k - 1 has ended, and is live `--train-s` later. Utilisation is the fraction
of places in flight that generate. The work is the same in both, so (utilisation) / (utilisation of the bound) is
(seconds of the bound) / (seconds).
"""

import asyncio
import resource
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from virtual_time import VirtualLoop

from async_grpo.cluster.controller import RunController
from async_grpo.experience.config import NO_FACTS, BatchConfig
from async_grpo.experience.dataset import Question
from async_grpo.messages import SharedRunSettings, StepEnd, WorkerInfo
from async_grpo.protocols import WeightPackage
from async_grpo.testing import FakeVerification, completion
from async_grpo.types import GENERATION, Completion, FinishReason

# Seconds of a token, and median, sigma and maximum of a completion's length in tokens
TOKEN_S, MEDIAN, SIGMA, LONGEST = 0.2, 256, 0.8, 2048


class WorkingLoop(VirtualLoop):
    """An event loop whose virtual time also advances by the CPU time that this process uses."""

    def time(self) -> float:
        return self._now + time.process_time()


def lengths(ordinal: int, members: int) -> np.ndarray:
    """Return the lengths (members,) of the completions of a prompt, in tokens."""
    drawn = np.random.default_rng(ordinal).lognormal(np.log(MEDIAN), SIGMA, members)
    return np.clip(drawn, 1, LONGEST).astype(int)


class Link:
    """A `WorkerLink` to an engine that generates a token of every sequence in TOKEN_S, however many there are."""

    live = 0

    def __init__(self, handle: Any, name: str, on_lost: Callable[..., None]) -> None:
        pass

    async def call(self, method: str) -> dict[str, Any]:
        return {"token_timeline": [], "paused_s": 0.0, "busy": []}

    async def stream(
        self, method: str, prompt: np.ndarray, seeds: Mapping[int, int], *more: Any
    ) -> AsyncGenerator[Completion]:
        loop, all_lengths = asyncio.get_running_loop(), lengths(int(prompt[0]), len(seeds))
        begun = loop.time()
        for member in np.argsort(all_lengths).tolist():
            length = int(all_lengths[member])
            await asyncio.sleep(begun + length * TOKEN_S - loop.time())
            made = completion(length, Link.live).arrays
            yield Completion(*made, FinishReason.STOP, "", None, member)

    def close(self) -> None:
        pass


def bound_s(config: BatchConfig, train_s: float) -> float:
    """Return the seconds until the last step is live if the controller takes no time."""
    live: list[float] = []
    for step in range(config.num_steps):
        admitted = live[step - config.max_staleness - 1] if step > config.max_staleness else 0.0
        numbers = range(step * config.groups_per_step, (step + 1) * config.groups_per_step)
        longest = max(lengths(number, config.samples_per_question).max() for number in numbers)
        live.append(max(admitted + longest * TOKEN_S, live[-1] if live else 0.0) + train_s)
    return live[-1]


async def train(config: BatchConfig, workers: int, train_s: float) -> float:
    """Return the seconds from the first admission until the last step is live."""
    settings = SharedRunSettings("run", "", 9, "float32", 1.0, (), 9, 9, "object_store", (), 7, library="")
    controller = RunController(settings, 60.0, Link, "least_loaded")
    places = -(-config.samples_in_flight // workers)
    places += -places % config.samples_per_question  # round up to whole groups
    names = [f"w{number}" for number in range(workers)]
    for name in names:
        await controller.register(WorkerInfo(name, GENERATION, places, 10**9), None)
    await controller.end_sync(WeightPackage(0, {}, [], [], np.zeros(0), 1e-4), names)
    # The first token of a prompt is its ordinal, in the order in which the cursor draws prompts
    count = config.num_steps * config.groups_per_step
    order = np.random.default_rng((config.infinite_sampler_seed, 0)).permutation(count)
    row = {"input": "", "answer": ""}
    questions = [Question(np.array([place], np.int32), row) for place in np.argsort(order)]
    verification = lambda: FakeVerification(lambda sample: sample["completion_token_ids"][-1] % 7)  # noqa: E731
    await controller.start_batcher(config, NO_FACTS, 1, questions, verification)
    begun = asyncio.get_running_loop().time()
    await controller.start()
    while Link.live < config.num_steps:
        if isinstance(await controller.next_message(0), StepEnd):
            await asyncio.sleep(train_s)
            Link.live += 1
            await controller.end_sync(WeightPackage(Link.live, {}, [], [], np.zeros(0), 1e-4), names)
    taken = asyncio.get_running_loop().time() - begun
    await controller.stop()
    return taken


def main(
    workers: Annotated[int, typer.Option(help="Registered workers.")] = 1024,
    groups: Annotated[int, typer.Option(help="Groups of a step.")] = 1563,
    members: Annotated[int, typer.Option(help="Samples per group.")] = 32,
    staleness: Annotated[int, typer.Option(help="Maximum staleness in steps.")] = 1,
    steps: Annotated[int, typer.Option(help="Steps of the run.")] = 4,
    train_s: Annotated[float, typer.Option(help="Seconds of a step and its sync.")] = 60.0,
) -> None:
    config = BatchConfig(
        batch_size=groups,
        samples_per_question=members,
        max_staleness=staleness,
        num_training_batches=steps,
        experience_timeout_s=1e6,
        checkpoint_every_s=1e6,
    )
    least, before = bound_s(config, train_s), resource.getrusage(resource.RUSAGE_SELF)
    loop = WorkingLoop(lambda: 0.0)
    taken = loop.run_until_complete(train(config, workers, train_s))
    after, samples = resource.getrusage(resource.RUSAGE_SELF), steps * config.samples_per_step
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"{workers} workers, {config.samples_in_flight} samples in flight, {steps} steps of {config.samples_per_step}"
    )
    print(f"peak memory {after.ru_maxrss / 2**20:.2f} GiB, {before.ru_maxrss / 2**20:.2f} before it began")
    print(
        f"CPU {cpu_s:.0f} s, {1000 * cpu_s / samples:.2f} ms a sample, {samples / cpu_s:.0f} samples a second"
    )
    print(f"{taken:.0f} s, the bound is {least:.0f} s: utilisation is {least / taken:.1%} of the bound's")


if __name__ == "__main__":
    typer.run(main)
