"""Measure the load of engines and the time of a step with tools that take 0.1 to 4 seconds, and compare with other loops.

    python -m benchmarks.tool_delays

Controller, registry, batcher and `Played` are real. Engines, tools and trainer only wait, in virtual time. A trajectory
has `--turns` turns. Lengths of turns are log-normal, and times of tools log-uniform. The engines have fewer places than
there are trajectories alive, because a trajectory takes no place while its tool works.

Formula: if trajectories wait for nothing else, the fraction duty = generating / (generating + tools) of them is in an
engine at any time.

With the same random lengths and times, two other loops are measured. In lockstep, a whole batch generates a turn, then
all tools work, then the next turn follows; after the last turn the step is trained. The other is this library strictly
on-policy (`--max-staleness 0`).
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from virtual_time import run

from async_grpo.cluster.controller import RunController
from async_grpo.data import TINY_MODEL
from async_grpo.environments.chat import Chat
from async_grpo.environments.config import TrajectoryLimits
from async_grpo.environments.played import Played
from async_grpo.environments.trajectory_client import TrajectoryClient
from async_grpo.experience.config import NO_FACTS, BatchConfig
from async_grpo.experience.dataset import Question
from async_grpo.messages import SharedRunSettings, StepEnd, WorkerInfo
from async_grpo.modeling.load import load_tokenizer
from async_grpo.protocols import WeightPackage
from async_grpo.testing import FakeVerification, completion
from async_grpo.types import GENERATION, Completion, FinishReason, Prompt

# Seconds of a token, and median, sigma and maximum of a turn's length in tokens
TOKEN_S, MEDIAN, SIGMA, LONGEST = 0.02, 48, 0.8, 200
WORKERS, BATCH, MEMBERS, TRAIN_S = 4, 16, 8, 4.0


@dataclass
class Delays:
    """The length of each turn and the time of each tool call. They depend only on trajectory and turn."""

    tools_s: tuple[float, float]
    turns: int

    def tokens(self, ordinal: int, member: int, turn: int) -> int:
        drawn = np.random.default_rng((1, ordinal, member, turn)).lognormal(np.log(MEDIAN), SIGMA)
        return int(np.clip(drawn, 1, LONGEST))

    def tool_s(self, ordinal: int, member: int, turn: int) -> float:
        if not self.tools_s[1]:
            return 0.0
        return float(np.exp(np.random.default_rng((2, ordinal, member, turn)).uniform(*np.log(self.tools_s))))

    def duty(self, ordinals: int) -> float:
        """Return the fraction of a trajectory's seconds in which it generates, if it waits for nothing."""
        keys = [(o, m, t) for o in range(ordinals) for m in range(MEMBERS) for t in range(self.turns)]
        generating = sum(self.tokens(*key) for key in keys) * TOKEN_S
        return generating / (generating + sum(self.tool_s(*key) for key in keys if key[2] < self.turns - 1))

    def lockstep_s(self, ordinals: int) -> float:
        """Return the mean seconds of a step in lockstep: the whole batch goes turn by turn."""
        steps = [range(first, first + BATCH) for first in range(0, ordinals, BATCH)]
        taken = 0.0
        for ordinals_of_step in steps:
            for turn in range(self.turns):
                keys = [(ordinal, member, turn) for ordinal in ordinals_of_step for member in range(MEMBERS)]
                taken += TOKEN_S * max(self.tokens(*key) for key in keys)
                taken += max(self.tool_s(*key) for key in keys) if turn < self.turns - 1 else 0.0
            taken += TRAIN_S
        return taken / len(steps)


class Gauge:
    """Integrates a number, such as that of trajectories alive, over time."""

    def __init__(self) -> None:
        self.now, self._seconds, self._at = 0, 0.0, 0.0

    def add(self, change: int) -> float:
        """Change the number, and return its integral until now."""
        at = asyncio.get_running_loop().time()
        self._seconds += self.now * (at - self._at)
        self.now, self._at = self.now + change, at
        return self._seconds


class Link:
    """A `WorkerLink` to an engine that generates a token of every sequence in TOKEN_S, however many there are."""

    live, busy, delays = 0, Gauge(), Delays((0, 0), 0)

    def __init__(self, handle: Any, name: str, on_lost: Callable[..., None]) -> None:
        pass

    async def call(self, method: str) -> dict[str, Any]:
        return {"token_timeline": [], "paused_s": 0.0, "busy": []}

    async def stream(
        self, method: str, prompt: np.ndarray, seeds: Mapping[int, int], *more: Any
    ) -> AsyncGenerator[Completion]:
        (member,) = seeds
        length = self.delays.tokens(int(prompt[0]), member, int((prompt[1:] == 0).sum()))
        self.busy.add(+1)
        await asyncio.sleep(length * TOKEN_S)
        self.busy.add(-1)
        yield Completion(*completion(length, Link.live).arrays, FinishReason.STOP, "", None, member)

    def close(self) -> None:
        pass


async def train(delays: Delays, staleness: int, steps: int, places: int) -> tuple[float, float]:
    """Return (mean seconds of a step, mean load of engines / mean number of trajectories), without the first two steps."""
    Link.live, Link.busy, Link.delays, alive = 0, Gauge(), delays, Gauge()

    async def rollout(prompt: Prompt, policy: TrajectoryClient) -> Completion:
        tokens, member = prompt.token_ids, policy._session.member
        alive.add(+1)
        for turn in range(delays.turns):
            reply = await policy.complete(tokens)
            # Token 0 ends a turn
            tokens = np.concatenate([tokens, reply.completion.token_ids, [0]]).astype(np.int32)
            if turn < delays.turns - 1:
                await asyncio.sleep(delays.tool_s(int(prompt.token_ids[0]), member, turn))
        alive.add(-1)
        return policy.trajectory(1.0)

    config = BatchConfig(
        batch_size=BATCH,
        samples_per_question=MEMBERS,
        max_staleness=staleness,
        num_training_batches=steps,
        experience_timeout_s=1e6,
        checkpoint_every_s=1e6,
    )
    settings = SharedRunSettings("r", "", 300, "float32", 1.0, (), 9, 9, "object_store", (), 7, library="")
    controller = RunController(settings, 60.0, Link, "least_loaded")
    names = [f"w{number}" for number in range(WORKERS)]
    for name in names:
        await controller.register(WorkerInfo(name, GENERATION, -(-places // WORKERS), 10**9), None)
    await controller.end_sync(WeightPackage(0, {}, [], [], np.zeros(0), 1e-4), names)
    questions = [Question(np.array([n], np.int32), {"input": "", "answer": ""}) for n in range(steps * BATCH)]
    limits = TrajectoryLimits(delays.turns, 10**6, None, 1e6, 10**6)
    make = partial(Played, program=rollout, chat=Chat(load_tokenizer(TINY_MODEL)), limits=limits)
    reward = lambda sample: sample["completion_token_ids"][-1] % 7  # noqa: E731
    await controller.start_batcher(
        config, NO_FACTS, 1, questions, partial(FakeVerification, reward), None, make
    )
    await controller.start()
    now, begun, before = asyncio.get_running_loop().time, 0.0, (0.0, 0.0)
    while Link.live < steps:
        if isinstance(await controller.next_message(0), StepEnd):
            await asyncio.sleep(TRAIN_S)
            Link.live += 1
            await controller.end_sync(WeightPackage(Link.live, {}, [], [], np.zeros(0), 1e-4), names)
            if Link.live == 2:
                begun, before = now(), (Link.busy.add(0), alive.add(0))
    taken = (now() - begun) / (steps - 2)
    load = (Link.busy.add(0) - before[0]) / (alive.add(0) - before[1])
    await controller.stop()
    return taken, load


def main(
    turns: Annotated[int, typer.Option(help="Turns of a trajectory.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = 20,
) -> None:
    print(
        "tools, s   duty   in engines, of those alive   off by   step, s: ours  on-policy  lockstep   ours better by"
    )
    for tools_s in [(0.0, 0.0), (0.1, 0.4), (0.4, 1.6), (1.0, 4.0), (0.1, 4.0)]:
        delays = Delays(tools_s, turns)
        duty, lockstep_s = delays.duty(steps * BATCH), delays.lockstep_s(steps * BATCH)
        places = int(1.25 * 2 * BATCH * MEMBERS * duty)  # a quarter more places than are needed on average
        ours_s, load = run(train(delays, 1, steps, places), None)
        on_policy_s, _ = run(train(delays, 0, steps, places), None)
        print(
            f"{tools_s[0]:3} to {tools_s[1]:3} {duty:6.3f} {load:18.3f} {load / duty - 1:17.1%} {ours_s:16.2f} "
            f"{on_policy_s:10.2f} {lockstep_s:9.2f} {on_policy_s / ours_s:10.2f}, {lockstep_s / ours_s:.2f} x"
        )


if __name__ == "__main__":
    typer.run(main)
