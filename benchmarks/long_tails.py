"""Simulate steps whose completion lengths have long tails, for different orders of training and numbers of groups alive.

    python -m benchmarks.long_tails --sigma 1 1.4 --bound 4 --alive 2 2.2 2.5 3

The simulation uses the real StalenessBudget and StepAssembler in virtual time, without a model. A step has 64 groups of
16. An engine has 1,024 places, and generates one token of every running sequence at a time. Completions have log-normal
lengths. The trainer works on each group as soon as it gets it (50 s for a step), and then syncs (5 s). Scoring takes no
time.

First, groups are trained in the order of admission (`--max-staleness` alone). Then `--groups-alive`, given in steps, is
lower than the bound allows. Two kinds of staleness are printed. That of a group is (its step) - (version that was live
at its admission), so it belongs to the oldest tokens. That of tokens is the metric `staleness_mean` of a run; it is
lower, because weights change while a long completion is generated. `least`: while a group takes D seconds to generate,
at least floor(D / step time) versions go live, in whatever order groups are trained.
"""

import argparse
import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from async_grpo.experience.staleness import StalenessBudget, StepAssembler, StepComplete
from async_grpo.testing import completion
from async_grpo.types import Group, Prompt, RewardStatus, Sample, Verdict

GROUPS, MEMBERS, PLACES, TRAIN_S, SYNC_S = 64, 16, 1024, 50.0, 5.0
OK = Verdict(RewardStatus.OK, 1.0)


class _Unpacked:
    """Takes the place of packing: the trainer's time depends only on the number of groups."""

    def add(self, sample: Sample) -> None: ...

    def flush(self) -> list[None]:
        return []


class _HandedOut:
    """Takes the place of advantages: records which groups went to the trainer."""

    group_local = True

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def __call__(self, groups: list[Group], step: int) -> list[Group]:
        self.groups += groups
        return groups


@dataclass
class Rollout:
    """A group while it is generated: a start and a length for each member, in seconds."""

    version: int
    lengths: np.ndarray
    starts: list[float] = field(default_factory=list)
    ended: int = 0


@dataclass(frozen=True)
class Outcome:
    step_s: float
    group_staleness: float
    token_staleness: float
    oldest: int
    least: float  # mean staleness of groups that no order of training could avoid at this speed
    engine_used: float  # mean fraction of the engine's places that are in use


class Simulation:
    """One simulated run in virtual seconds."""

    def __init__(
        self, bound: int, alive: int | None, sigma: float, median_s: float, longest_s: float, seed: int
    ) -> None:
        self.budget = StalenessBudget(GROUPS, bound, alive)
        self.handed_out = _HandedOut()
        self.steps = StepAssembler(self.budget, _Unpacked(), self.handed_out)
        self.draw, self.sigma = np.random.default_rng(seed), sigma
        self.median_s, self.longest_s = median_s, longest_s
        self.now, self.places, self.used_s = 0.0, PLACES, 0.0
        self.events: list[tuple[float, int, int]] = []  # (time, group, member); group -1 means new weights
        self.queue: deque[tuple[int, int]] = deque()  # (group, member) of the members that wait for a place
        self.rollouts: list[Rollout] = []
        self.live_at: list[float] = [0.0]  # time at which each version went live
        self.trainer_free_at = 0.0
        self.ages: list[tuple[int, Rollout]] = []  # (step, rollout) of each trained group

    def run(self, steps: int, warm_up: int) -> Outcome:
        asyncio.run(self._run(steps))
        ages = [(step, rollout) for step, rollout in self.ages if step >= warm_up]
        tokens, stale = zip(*(self._token_staleness(step, rollout) for step, rollout in ages), strict=True)
        step_s = (self.live_at[steps] - self.live_at[warm_up]) / (steps - warm_up)
        return Outcome(
            step_s=step_s,
            group_staleness=float(np.mean([step - rollout.version for step, rollout in ages])),
            token_staleness=sum(stale) / sum(tokens),
            oldest=max(step - rollout.version for step, rollout in ages),
            least=float(np.mean([rollout.lengths.max() // step_s for _, rollout in ages])),
            engine_used=self.used_s / (PLACES * self.now),
        )

    async def _run(self, steps: int) -> None:
        await self._admit()
        while len(self.live_at) <= steps:
            self.now, group, member = heapq.heappop(self.events)
            if group < 0:
                self.live_at.append(self.now)
                await self.budget.weights_live(len(self.live_at) - 1, GROUPS)
                await self._admit()
                continue
            self.places += 1
            self.used_s += self.rollouts[group].lengths[member]
            self._start_waiting()
            self.rollouts[group].ended += 1
            if self.rollouts[group].ended == MEMBERS:
                self._offer(group)

    async def _admit(self) -> None:
        while self.budget.free:
            lengths = self.median_s * np.exp(self.sigma * self.draw.standard_normal(MEMBERS))
            lengths = np.minimum(lengths, self.longest_s)
            self.queue += [(len(self.rollouts), member) for member in range(MEMBERS)]
            self.rollouts.append(Rollout(await self.budget.admit(), lengths, [0.0] * MEMBERS))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self.queue and self.places:
            group, member = self.queue.popleft()
            self.places -= 1
            self.rollouts[group].starts[member] = self.now
            ends = self.now + self.rollouts[group].lengths[member]
            heapq.heappush(self.events, (ends, group, member))

    def _offer(self, number: int) -> None:
        version = self.rollouts[number].version
        prompt = Prompt(number, np.zeros(1, np.int32), {})
        group = Group(prompt, (Sample(prompt, completion(1, version), OK),), version, number)
        for end in self.steps.offer(group):
            assert isinstance(end, StepComplete)
            self.ages += [(end.step, self.rollouts[trained.sequence_number]) for trained in end.groups]
            self._train(self.handed_out.groups.index(end.groups[-1]) + 1)
            self.trainer_free_at += SYNC_S
            heapq.heappush(self.events, (self.trainer_free_at, -1, 0))
        self._train(len(self.handed_out.groups))

    def _train(self, groups: int) -> None:
        """Train this number of groups.

        Each takes its part of a step's time. It starts when the group has arrived and the groups before it are done.
        """
        for _ in range(groups):
            self.trainer_free_at = max(self.trainer_free_at, self.now) + TRAIN_S / GROUPS
        del self.handed_out.groups[:groups]

    def _token_staleness(self, step: int, rollout: Rollout) -> tuple[float, float]:
        """Return (seconds of generation of all members, the same seconds multiplied by the staleness of their tokens).

        The staleness changes while a member is generated, because new versions go live.
        """
        live_at = np.array(self.live_at[1 : step + 1])
        starts = np.array(rollout.starts)[:, None]
        younger = np.clip(starts + rollout.lengths[:, None] - np.maximum(live_at, starts), 0, None)
        total = rollout.lengths.sum()
        return total, step * total - younger.sum()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sigma", type=float, nargs="+", default=[1.0, 1.4])
    parser.add_argument(
        "--median-s",
        type=float,
        default=30.0,
        help="median seconds of a completion: 1,500 tokens at 50 per second",
    )
    parser.add_argument(
        "--longest-s", type=float, default=328.0, help="maximum seconds of a completion: 16,384 tokens"
    )
    parser.add_argument("--bound", type=int, default=4, help="--max-staleness of the runs with --alive")
    parser.add_argument(
        "--alive", type=float, nargs="+", default=[2, 2.2, 2.5, 3], help="--groups-alive, in steps"
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    columns = tuple(Outcome.__dataclass_fields__)
    print("sigma bound  alive", *(f"{name:>15}" for name in columns))
    for sigma in args.sigma:
        settings = [(bound, None) for bound in (0, 1, 2, 4)]
        settings += [(args.bound, round(alive * GROUPS)) for alive in args.alive]
        for bound, alive in settings:
            of_run = (bound, alive, sigma, args.median_s, args.longest_s)
            runs = [Simulation(*of_run, seed).run(args.steps, args.steps // 4) for seed in range(args.seeds)]
            means = [np.mean([getattr(run, name) for run in runs]) for name in columns]
            print(
                f"{sigma:>5} {bound:>5} {(alive or (bound + 1) * GROUPS) / GROUPS:>6.2f}",
                *(f"{mean:>15.2f}" for mean in means),
                flush=True,
            )


if __name__ == "__main__":
    main()
