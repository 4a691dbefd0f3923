"""Are completions still as long when engines are lost all the time?

    python -m tests.long.lost_engines                         # 300 groups of 8, some 250 losses, half a minute

The real `GenerationWorkers`, four engines of which one dies every so many tokens and is replaced, lengths that are decided
token by token, of very different means. Each completion is compared with itself without losses; and with what redrawing
what a lost engine had not finished, with other draws, makes of them.
"""

import argparse
import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_grpo.cluster.registered_workers import GenerationWorkers
from async_grpo.errors import PromptSetAside, WorkerLost
from async_grpo.experience.worker_registry import least_loaded
from async_grpo.messages import WorkerInfo
from async_grpo.types import Completion, FinishReason, Prompt, Tokens

GROUP, LONGEST, TOLD_EVERY, ENGINES = 8, 3000, 50, 4
NEVER = 10**9


@dataclass
class Fleet:
    """What the engines share: how long they live, and whether they go on with the draws of a seed."""

    mean_life: int  # in tokens of each of its sequences
    redraws: bool = False

    def __post_init__(self) -> None:
        self.random, self.losses, self.fresh = np.random.default_rng(5), 0, itertools.count(10**6)


class Link:
    """`WorkerLink` to an engine that is lost after some tokens."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.left = fleet, int(fleet.random.exponential(fleet.mean_life))

    async def stream(
        self, method: str, prompt: np.ndarray, seeds: Mapping[int, int], sampling: Any, begun: Any = None
    ) -> AsyncGenerator[Any]:
        given = {} if self.fleet.redraws else dict(begun or {})
        seeds = {m: next(self.fleet.fresh) for m in seeds} if self.fleet.redraws else seeds
        draws = {m: np.random.default_rng(seed).random(LONGEST) for m, seed in seeds.items()}
        have = {m: len(given.get(m, ())) for m in seeds}
        told, ends = dict(have), 1 / (20 + 4 * int(prompt[0]))  # the chance of each token
        for step in itertools.count(1):
            self.left -= 1
            await asyncio.sleep(0)
            if self.left <= 0:
                self.fleet.losses += 1
                raise WorkerLost("planted")
            for member in list(have):
                have[member] += 1
                if draws[member][have[member] - 1] < ends or have[member] == LONGEST:
                    ids = tokens(draws[member][: have.pop(member)])
                    yield Completion(*ids.arrays, finish_reason=FinishReason.STOP, text="", member=member)
            if not have:
                return
            if step % TOLD_EVERY == 0 and not self.fleet.redraws:
                yield {m: tokens(draws[m][told[m] : count]) for m, count in have.items()}
                told = dict(have)

    def close(self) -> None:
        pass


def tokens(draws: np.ndarray) -> Tokens:
    ids = (draws * 1e6).astype(np.int32)
    return Tokens(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))


async def generate(fleet: Fleet, groups: int) -> dict[tuple[int, int], np.ndarray]:
    """The completions, by prompt and member."""
    connect: Callable[..., Any] = lambda handle, name, on_lost: Link(fleet)  # noqa: E731
    workers = GenerationWorkers(3, 5.0, connect, least_loaded)
    workers.is_frozen = True  # they work at once
    found: dict[tuple[int, int], np.ndarray] = {}
    places = asyncio.Semaphore(8)

    async def replace() -> None:
        for number in itertools.count():
            while len(workers.by_id) >= ENGINES:
                await asyncio.sleep(0)
            await workers.register(WorkerInfo(f"e{number}", "generation", 64, 10**7), None)

    async def group(ordinal: int) -> None:
        prompt = Prompt(ordinal, np.array([ordinal * 37 % 100], np.int32), {})
        async with places:
            try:
                async for completion in workers.generate(prompt, GROUP):
                    found[ordinal, completion.member] = completion.token_ids
            except PromptSetAside:
                pass

    replacing = asyncio.ensure_future(replace())
    await asyncio.gather(*map(group, range(groups)))
    replacing.cancel()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=300)
    parser.add_argument(
        "--mean-life", type=int, default=1600, help="tokens of each sequence that an engine makes"
    )
    options = parser.parse_args()
    whole = asyncio.run(generate(Fleet(NEVER), options.groups))
    expected = np.mean(list(map(len, whole.values())))
    for what, redraws in (("going on", False), ("redrawn", True)):
        fleet = Fleet(options.mean_life, redraws)
        found = asyncio.run(generate(fleet, options.groups))
        same = sum(np.array_equal(whole[key], ids) for key, ids in found.items())
        mean = np.mean(list(map(len, found.values())))
        print(
            f"{what}: {fleet.losses} losses, {len(found)} of {len(whole)} completions, {same} of them as without losses; "
            f"mean length {mean:.1f}, without losses {expected:.1f} ({mean / expected - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
