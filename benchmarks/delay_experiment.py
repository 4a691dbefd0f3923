"""Measure seconds per step with slow rewards, many at a time, against closed-form formulas, and with faults.

    python -m benchmarks.delay_experiment --steps 20            # about 15 minutes
    python -m benchmarks.delay_experiment --steps 20 --arms faults

ExperienceBatcher and VerifierPool are real. Generation, log-probs, update and rewards only wait (asyncio sleeps), for
1/100 of the times of a published run: generation G = 0.40 s for all samples of a step, log-probs L = 0.80 s, update U =
1.16 s, a reward D ~ uniform(0.01, 0.40) s. A step has N = 128 groups x 8 samples, and c rewards run at once. There is
no GPU and no Ray. Run it alone, because the CPU must not be the bottleneck. Formulas for the seconds of a step (mean
delay mu, R(N, c) = N mu / c - E[D^2] / (2 mu) + Dmax):

    sync      generate all, then score all (log-probs meanwhile), update
              G + max(L, R) + U
    ours      one step behind, scoring while generating, one update
              max(G, L + U, N mu / c, (max(G, g0 + R) + L + U) / 2)
    ours+mb   the same, micro-batches computed as they fill up: what the library does
              max(G, L + U, N mu / c, (max(G, g0 + R) + (L + U) / M) / 2)
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from async_grpo.errors import WorkerLost
from async_grpo.experience.batcher import ExperienceBatcher
from async_grpo.experience.config import BatchConfig, EvaluationConfig
from async_grpo.experience.dataset import Question
from async_grpo.messages import MicroBatch, StepEnd
from async_grpo.rewards.pool import VerifierPool
from async_grpo.testing import completion
from async_grpo.types import AdapterResult, Completion, Prompt, RewardStatus, Sampling, Verdict

G, L, U, M = 0.40, 0.80, 1.16, 4
LOW, HIGH = 0.01, 0.40
GROUPS, MEMBERS = 128, 8
N = GROUPS * MEMBERS
MEAN, SECOND_MOMENT = (LOW + HIGH) / 2, (HIGH**3 - LOW**3) / (3 * (HIGH - LOW))
FIRST_FINISHED = 0.3 * G
TOKENS = 10
WORKERS = 8  # number of workers that share the reward slots
HANG_TIMEOUT_S = 0.5


def makespan(slots: int) -> float:
    """Return R(N, c), the seconds in which N rewards are computed."""
    return N * MEAN / slots - SECOND_MOMENT / (2 * MEAN) + HIGH


def closed_form(mode: str, slots: int) -> float:
    """Return the ideal seconds per step, by the formula at the top of this file."""
    rewards, busy = makespan(slots), N * MEAN / slots
    if mode == "sync":
        return G + max(L, rewards) + U
    trainer = (L + U) / M if mode == "ours+mb" else L + U
    return max(G, L + U, busy, (max(G, FIRST_FINISHED + rewards) + trainer) / 2)


class Engine:
    """Generates the samples of one step at a time. Each step takes G seconds, and its samples end between 0.3 G and G."""

    def __init__(self, seed: int) -> None:
        self.live = 0
        self._draw = random.Random(seed)
        self._free_at = 0.0
        self._starts: dict[int, float] = {}
        self._asked = 0

    async def generate(
        self, prompt: Prompt, count: int, sampling: Sampling | None = None
    ) -> AsyncIterator[Completion]:
        step = max(0, prompt.ordinal) // GROUPS if prompt.ordinal >= 0 else -1
        version = self.live
        if step not in self._starts:
            now = time.monotonic()
            self._starts[step] = now if step < 0 else max(now, self._free_at)
            self._free_at = max(self._free_at, self._starts[step] + (G if step >= 0 else 0))
        ends = sorted(self._starts[step] + self._draw.uniform(FIRST_FINISHED, G) for _ in range(count))
        for number, end in enumerate(ends):
            await asyncio.sleep(end - time.monotonic())
            yield completion(TOKENS - number % 2, version)

    async def take_stats(self) -> dict:
        return {"token_timeline": [], "wait_generation_weights_s": 0.0, "busy": []}


@dataclass
class Faults:
    """Faults of the rewards that an arm simulates."""

    exceptions: float = 0.0  # fraction of the calls that raise an exception
    hangs: float = 0.0
    kill_at: float = 0.0  # seconds after the start at which one worker dies, with all samples that it scores
    # Seconds after the start at which every call is refused for one second, and tried again later
    storm_at: float = 0.0
    evaluations: bool = False  # whether 256 samples of an evaluation come every 5 steps
    killed: list[str] = field(default_factory=list)


class SlowWorker:
    """Scores `capacity` samples at once, each after its delay, and counts its calls."""

    def __init__(self, adapter: str, capacity: int, bench: "Bench") -> None:
        self.adapter, self.capacity, self.bench = adapter, capacity, bench
        self._dead = asyncio.Event()

    async def score(self, sample: dict, timeout_s: float) -> AdapterResult:
        work = asyncio.ensure_future(self._work(sample))
        death = asyncio.ensure_future(self._dead.wait())
        try:
            done, _ = await asyncio.wait({work, death}, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if death in done:
                raise WorkerLost("killed")
            if not done:
                return AdapterResult(self.adapter, RewardStatus.TIMED_OUT, reason="it hung")
            return work.result()
        finally:
            work.cancel()
            death.cancel()

    async def _work(self, sample: dict) -> AdapterResult:
        bench, faults = self.bench, self.bench.faults
        elapsed = time.monotonic() - bench.started
        if faults.kill_at and elapsed > faults.kill_at and not faults.killed:
            faults.killed.append(self.adapter)
            self._dead.set()
        draw = bench.draw.random()
        if draw < faults.hangs:
            await asyncio.sleep(3600)
        while faults.storm_at and faults.storm_at < time.monotonic() - bench.started < faults.storm_at + 1.0:
            # Like an answer 429 of a server: wait for a random time, and try again
            await asyncio.sleep(bench.draw.uniform(0.05, 0.2))
        await asyncio.sleep(bench.draw.uniform(LOW, HIGH))
        bench.scored[sample["group_id"], sample["sample_text"]] += 1
        if draw > 1 - faults.exceptions:
            return AdapterResult(self.adapter, RewardStatus.FAILED, reason="an exception")
        return AdapterResult(self.adapter, RewardStatus.OK, float(len(sample["completion"])))

    async def close(self) -> None:
        self._dead.set()


class Bench:
    """One run of the real batcher and pool, with simulated engines, rewards and trainer."""

    def __init__(self, slots: int, faults: Faults, seed: int = 0) -> None:
        self.faults, self.draw, self.slots = faults, random.Random(seed), slots
        self.scored: Counter = Counter()
        self.started = 0.0
        self.pool = VerifierPool(
            ["judge"],
            self._make,
            workers=WORKERS,
            evaluation_workers=WORKERS,
            timeout_s=HANG_TIMEOUT_S if faults.hangs else 10.0,
            backoff_s=(0.0,),
        )

    async def _make(self, adapter: str) -> SlowWorker:
        return SlowWorker(adapter, self.slots // WORKERS, self)

    def batcher(self, steps: int, engine: Engine) -> ExperienceBatcher:
        config = BatchConfig(
            batch_size=GROUPS,
            num_training_batches=steps,
            samples_per_question=MEMBERS,
            max_staleness=1,
            max_tokens_per_gpu=-(-N // M) * (TOKENS + 1),
            experience_timeout_s=60,
            infinite_sampler_seed=0,
        )
        questions = [Question(np.array([1], np.int32), {"input": f"q{i}"}) for i in range(GROUPS)]
        return ExperienceBatcher(config, questions, engine, Verification(self.pool))


class Verification:
    """Makes the pool available through the batcher's protocol."""

    def __init__(self, pool: VerifierPool) -> None:
        self.pool = pool

    async def verify(self, sample: dict, *, evaluation: bool = False) -> Verdict:
        return await self.pool.verify(sample, evaluation=evaluation)

    async def take_stats(self) -> dict:
        return self.pool.take_stats()


@dataclass
class Outcome:
    """The results of one run."""

    seconds: list[float]  # seconds of each step
    ends: list[StepEnd]
    evaluations_s: list[float]
    alone_s: float = 0.0  # seconds of an evaluation while no training runs


async def ours(mode: str, slots: int, steps: int, faults: Faults | None = None) -> Outcome:
    """Run this library's pipeline with staleness 1."""
    bench, engine = Bench(slots, faults or Faults()), Engine(seed=1)
    await bench.pool.start()
    batcher = bench.batcher(steps, engine)
    outcome = Outcome([], [], [])
    questions = [Question(np.array([1], np.int32), {"input": f"eval {i}"}) for i in range(256)]
    if bench.faults.evaluations:
        # The first call creates the workers, so that the time of the evaluation does not include this
        await bench.pool.verify({"completion": "x", "group_id": -1, "sample_text": ""}, evaluation=True)
        outcome.alone_s = await _evaluate(batcher, engine, questions)
    bench.started = time.monotonic()
    await batcher.start()
    evaluations: list[asyncio.Task] = []
    for step in range(steps):
        began = time.monotonic()
        micro_batches = 0
        while isinstance(message := await batcher.next_message(0), MicroBatch):
            micro_batches += 1
            if mode == "ours+mb":
                await asyncio.sleep((L + U) * message.num_sequences / N)
        if mode == "ours":
            await asyncio.sleep(L + U)
        engine.live = step + 1
        await batcher.weights_live(step + 1)
        outcome.seconds.append(time.monotonic() - began)
        outcome.ends.append(message)
        if bench.faults.evaluations and step % 5 == 4:
            evaluations.append(asyncio.create_task(_evaluate(batcher, engine, questions)))
    outcome.evaluations_s = list(await asyncio.gather(*evaluations))
    await batcher.close()
    await bench.pool.close()
    _check(bench, outcome)
    return outcome


async def _evaluate(batcher: ExperienceBatcher, engine: Engine, questions: list[Question]) -> float:
    engine._starts.pop(-1, None)
    began = time.monotonic()
    await batcher.evaluate(questions, EvaluationConfig(eval_pinned=True))
    return time.monotonic() - began


def _check(bench: Bench, outcome: Outcome) -> None:
    """Check that no sample was lost, none was trained twice in a step, and no failure counted as a reward of 0."""
    for end in outcome.ends:
        statuses = {status: end.stats[f"num_reward_{status.value}"] for status in RewardStatus}
        assert sum(statuses.values()) == end.num_samples == N and end.num_groups == GROUPS, statuses
        assert end.stats["avg_reward"] >= TOKENS - 1, "a failure counted as a zero"
        assert end.stats["staleness_max"] <= 1
    if not (bench.faults.exceptions or bench.faults.hangs):
        assert all(end.stats["num_reward_ok"] == N for end in outcome.ends)


async def synchronous(slots: int, steps: int) -> list[float]:
    """Run the baseline: generate a whole step, score it (log-probs meanwhile), update."""
    bench = Bench(slots, Faults())
    await bench.pool.start()
    bench.started = time.monotonic()
    seconds = []
    for _ in range(steps):
        began = time.monotonic()
        await asyncio.sleep(G)
        samples = [{"completion": "x", "group_id": i // MEMBERS, "sample_text": str(i)} for i in range(N)]
        await asyncio.gather(asyncio.sleep(L), *(bench.pool.verify(sample) for sample in samples))
        await asyncio.sleep(U)
        seconds.append(time.monotonic() - began)
    await bench.pool.close()
    return seconds


FAULTS = {
    "1 % exceptions": Faults(exceptions=0.01),
    "1 % hangs": Faults(hangs=0.01),
    "a worker killed": Faults(kill_at=12.0),
    "a 429 storm of 1 s": Faults(storm_at=12.0),
    "evaluation bursts": Faults(evaluations=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=5, help="number of first steps that are not measured")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--arms", nargs="+", choices=("modes", "faults"), default=["modes", "faults"])
    args = parser.parse_args()
    failures = []
    for slots in args.slots:
        plain = None
        if "modes" in args.arms:
            baseline = statistics.mean(asyncio.run(synchronous(slots, args.steps // 2)))
            _say(slots, "sync", baseline, closed_form("sync", slots), failures)
            for mode in ("ours", "ours+mb"):
                seconds = statistics.mean(asyncio.run(ours(mode, slots, args.steps)).seconds[args.skip :])
                _say(slots, mode, seconds, closed_form(mode, slots), failures)
                print(f"      {1 - seconds / baseline:.1%} less than sync", flush=True)
                if 1 - seconds / baseline < {64: 0.33, 128: 0.40}.get(slots, 0.0):
                    failures.append(f"{mode} with {slots} slots saves too little")
                plain = seconds if mode == "ours+mb" else plain
        if "faults" in args.arms:
            plain = plain or statistics.mean(
                asyncio.run(ours("ours+mb", slots, args.steps)).seconds[args.skip :]
            )
            for name, faults in FAULTS.items():
                outcome = asyncio.run(ours("ours+mb", slots, args.steps, faults))
                seconds = statistics.mean(outcome.seconds[args.skip :])
                lost = sum(
                    e.stats["num_reward_failed"] + e.stats["num_reward_timed_out"] for e in outcome.ends
                )
                print(
                    f"c={slots:>4} {name:>20}: {seconds:.2f} s/step, {seconds / plain - 1:+.1%}; {lost} samples masked",
                    flush=True,
                )
                if seconds > 1.1 * plain:
                    failures.append(f"{name} with {slots} slots costs {seconds / plain - 1:.1%}")
                if outcome.evaluations_s:
                    worst = max(outcome.evaluations_s)
                    print(
                        f"      evaluation {worst:.2f} s at most, {outcome.alone_s:.2f} s alone", flush=True
                    )
                    if worst > 1.2 * outcome.alone_s:
                        failures.append(
                            f"evaluation with {slots} slots took {worst / outcome.alone_s:.2f} x its time alone"
                        )
    print("\n".join(failures) or "within all bounds")
    raise SystemExit(bool(failures))


def _say(slots: int, mode: str, seconds: float, ideal: float, failures: list[str]) -> None:
    print(
        f"c={slots:>4} {mode:>8}: {seconds:.2f} s/step, closed form {ideal:.2f} ({seconds / ideal - 1:+.1%})",
        flush=True,
    )
    if abs(seconds / ideal - 1) > 0.07:
        failures.append(f"{mode} with {slots} slots is {seconds / ideal - 1:+.1%} off its closed form")


if __name__ == "__main__":
    main()
