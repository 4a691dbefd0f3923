"""A run without Ray, engines and trainer: the real controller and what it holds, through a schedule in virtual time.

`SimulatedRun` stands for everything around the controller: the ranks, the weight sync, dispatchers with their workers. It
asserts, whatever happens: every group of a prompt that can be trained is, once, with all of its samples; every step is
whole and the same on every rank; no token is older than the bound; nobody works without having proven the weights that the
others hold; no worker is given more than it takes; and nothing is left at the end.
"""

import asyncio
import gc
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import virtual_time
from schedules import Event, Schedule
from simulated_fleet import SimulatedFleet
from simulated_samples import (
    MIN_VALID,
    RUN_SEED,
    Identity,
    Verification,
    check_trained,
    completion_of,
    trained_members,
)

from async_grpo.cluster.controller import RunController
from async_grpo.cluster.registered_workers import ATTEMPTS_WITHOUT_PROGRESS
from async_grpo.errors import RunFailed, WorkerLost
from async_grpo.experience.config import BatchConfig, EvaluationConfig, RunFacts
from async_grpo.experience.dataset import Question
from async_grpo.messages import MicroBatch, SaveRequested, SharedRunSettings, StepEnd, WorkersJoined
from async_grpo.processes.waits import situation

LIMIT_S = 3600.0  # virtual; a wait of a rank ends before, by name


def run_through(schedule: Schedule) -> Counter[str]:
    """How often what happened. AssertionError: something is wrong, see above; any other error is one of the library."""
    world: list[SimulatedRun] = []

    async def main() -> None:
        world.append(SimulatedRun(schedule))
        await world[0].play()

    with mock.patch.object(gc, "freeze"):  # or nothing of ten thousand runs would ever be collected
        virtual_time.run(main(), LIMIT_S, schedule.seed)
    return world[0].happened


class SimulatedRun(SimulatedFleet):
    """See above. Events that are about the run have a method of their name with an underscore, too."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__(schedule)
        self.config = BatchConfig(
            batch_size=schedule.groups,
            samples_per_question=schedule.members,
            num_training_batches=schedule.steps,
            max_staleness=schedule.staleness,
            groups_alive=schedule.groups_alive,
            deterministic=schedule.whole_steps,
            zero_variance="resample" if schedule.resample else "keep",
            max_resamples=2,
            min_valid_samples=MIN_VALID,
            max_tokens_per_gpu=16,
            experience_timeout_s=900.0,
            infinite_sampler_seed=schedule.seed,
        )
        self.facts = RunFacts(failure_policies={"fake": "refill"} if schedule.refill else {})
        self.trained: list[set[Identity]] = []  # by step
        self.taken: set[Identity] = set()  # of the step under way
        self.set_aside: set[int] = set()  # ordinals
        self.told: list[list[str]] = []  # to each rank
        self.checkpoint: tuple[int, Path] | None = None
        self.is_over = False
        self.unread: list[Any] = []  # errors
        self.outer = asyncio.all_tasks()

    async def play(self) -> None:
        """The whole run, with the checks at its end."""
        asyncio.get_running_loop().set_exception_handler(self._unread)
        events = asyncio.create_task(self._events())
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            while not self.is_over:
                await self._live()
        events.cancel()
        await asyncio.gather(events, return_exceptions=True)
        left = asyncio.all_tasks() - {asyncio.current_task()} - self.outer
        assert not left, f"tasks are left: {left}"
        assert not (waits := situation()["waits"]), f"waits are left: {waits}"
        assert not self.unread, f"errors that nobody read: {self.unread}"

    async def _live(self) -> None:
        """One controller, from its start to its end; another one goes on unless the run is over."""
        settings = SharedRunSettings(
            *("run", "", 100, "float32", 1.0, (), 64, 16, "object_store", self.schedule.roles, RUN_SEED),
            library="",
        )
        self.controller = RunController(settings, 90.0, self._connect, "least_loaded")
        self.interrupted = asyncio.Event()
        alive = Counter(worker.info.kind for worker in self.alive())
        self.workers.clear()
        for kind in self.kinds:
            for _ in range(alive[kind] or self.schedule.workers):
                self._bring(kind, self.draw.uniform(0, 2))
        living = self.spawn(self._train())
        stopping = self.spawn(self.interrupted.wait())
        await asyncio.wait((living, stopping), return_when="FIRST_COMPLETED")
        self.is_training = False
        error = living.exception() if living.done() else None
        if error is not None:
            self._explain(error)
            self.happened["ended by name"] += 1
        self.is_over |= error is not None or self.version == self.schedule.steps
        is_complete = living.done() and error is None and self.is_over
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()
        await self.controller.stop()
        await self._check_end(is_complete)

    async def _train(self) -> None:
        while (await self.controller.missing_parts()).description:
            await asyncio.sleep(0.2)
        questions = [Question(np.array([50 + n], np.int32), {"input": "", "answer": ""}) for n in range(7)]
        step, folder = self.checkpoint or (0, None)
        self.version, self.trained, self.taken = step, self.trained[:step], set()
        ranks, verification = self.schedule.ranks, partial(Verification, self.draw)
        await self.controller.start_batcher(self.config, self.facts, ranks, questions, verification, folder)
        self.barrier, self.told = asyncio.Barrier(ranks), [[] for _ in range(ranks)]
        self.proof = self.spawn(self._sync(self_test=True))
        await self.proof
        await self.controller.start()
        self.is_training = True
        try:
            async with asyncio.TaskGroup() as tasks:
                for rank in range(ranks):
                    tasks.create_task(self._rank(rank))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    def _explain(self, error: BaseException) -> None:
        """The only error that may end a run is a group over which too many workers were lost."""
        deaths = sum(self.happened[what] for what in ("workers lost", "proofs failed"))
        if not (
            isinstance(error, RunFailed) and "lost over" in str(error) and deaths >= ATTEMPTS_WITHOUT_PROGRESS
        ):
            raise error

    def _unread(self, loop: Any, context: dict[str, Any]) -> None:
        self.unread.append(context)

    # The ranks

    async def _rank(self, rank: int) -> None:
        upcoming: asyncio.Task[Any] | None = None
        try:
            while self.version < self.schedule.steps:
                message = await (upcoming or self.controller.next_message(rank))
                upcoming = None
                self.told[rank].append(type(message).__name__)
                self._check_counts()
                if isinstance(message, MicroBatch):
                    upcoming = asyncio.create_task(self.controller.next_message(rank))
                    self._take(message)
                    await asyncio.sleep(self.draw.choice((0.0, 0.5)))
                elif isinstance(message, StepEnd):
                    await self._together(rank, self._end_step, message)
                elif isinstance(message, WorkersJoined):
                    await self._together(rank, self._welcome)
                else:
                    await self._together(rank, self._saved, message)
                    if message.end_reason:
                        self.interrupted.set()
                        return
        finally:
            if upcoming:
                upcoming.cancel()

    async def _together(self, rank: int, act: Callable[..., Any], *args: Any) -> None:
        """A collective: rank 0 acts when all have come here, and all go on when it has."""
        await self.barrier.wait()
        if rank == 0:
            assert all(told == self.told[0] for told in self.told), f"the ranks were told: {self.told}"
            await act(*args)
        await self.barrier.wait()

    def _take(self, batch: MicroBatch) -> None:
        bounds = batch.cu_seqlens.tolist()
        for begin, end, ordinal in zip(bounds, bounds[1:], batch.group_ids.tolist(), strict=False):
            if not batch.is_dummy:
                ids = batch.input_ids[begin + 1 : end].tolist()  # after a prompt of one token
                one = ordinal, ids[0] - 1
                assert one not in self.taken.union(*self.trained), f"sample {one} came again"
                assert ids == completion_of(one), f"sample {one}: {ids}, drawn were {completion_of(one)}"
                self.taken.add(one)
        ages = self.version - batch.versions[batch.loss_mask]
        assert all((ages >= 0) & (ages <= self.schedule.staleness)), f"tokens in step {self.version}: {ages}"

    async def _end_step(self, end: StepEnd) -> None:
        schedule = self.schedule
        assert (end.step, end.num_groups) == (self.version, schedule.groups), f"{end} after {self.version}"
        assert end.num_samples == schedule.groups * schedule.members, f"step {end.step}: {end.num_samples}"
        by_group = Counter(ordinal for ordinal, _ in self.taken)
        assert len(by_group) <= schedule.groups, f"step {end.step} trained {by_group}"
        for ordinal, count in by_group.items():
            assert count == len(trained_members(schedule, ordinal)), (
                f"step {end.step} has {count} samples of {ordinal}"
            )
        self.happened["resampled"] += end.stats["prompts_resampled"]
        self.set_aside |= {told["prompt"] for told in end.stats["prompts_set_aside"]}
        self.happened["prompts set aside"] += len(end.stats["prompts_set_aside"])
        self.happened["steps"] += 1
        await self.proof  # no step on top of weights that did not land
        self.version, self.taken = self.version + 1, set()
        self.trained.append({(o, m) for o in by_group for m in trained_members(schedule, o)})
        self.proof = self.spawn(self._sync())
        if self.version == schedule.steps or self.draw.random() < 0.3:
            await self.proof

    async def _welcome(self) -> None:
        await self.proof
        self.happened["late syncs"] += 1
        await self._sync(self_test=True, for_late=True)

    async def _saved(self, request: SaveRequested) -> None:
        await self.proof
        self.happened["saved"] += 1
        folder = self.folder / f"{self.happened['saved']}"
        await self.controller.save_experience(folder, self.version)
        self.checkpoint = self.version, folder

    # What happens

    def _evaluate(self, event: Event) -> None:
        held_out = [Question(np.array([9], np.int32), {"input": "", "answer": ""})] * (1 + event.who)
        asked = EvaluationConfig(eval_samples=1 + event.who % 5, eval_pinned=event.who % 2 == 0)

        async def evaluate() -> None:
            with suppress(TimeoutError, WorkerLost):
                async with asyncio.timeout(event.lasts if event.what == "give_up" else None):
                    answer = (await self.controller.evaluate({"": held_out}, asked))[""]
                assert answer["num_samples"] == len(held_out) * asked.eval_samples, answer
                self.happened["evaluated"] += 1

        evaluation = self.spawn(evaluate())
        evaluation.add_done_callback(self._evaluation_done)

    def _evaluation_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.unread.append({"evaluation": error})

    def _save(self, event: Event) -> None:
        self.spawn(self.controller.request_save("it was told to" if event.what == "interrupt" else ""))

    _give_up, _interrupt = _evaluate, _save

    def _crash(self, event: Event) -> None:
        self.interrupted.set()

    def _stop(self, event: Event) -> None:
        self.is_over = True
        self.interrupted.set()

    # What must hold

    def _check_counts(self) -> None:
        batcher = self.controller.batcher
        budget = batcher.budget
        alive = batcher._admitted - budget.live_version * self.schedule.groups
        assert 0 <= budget.alive == alive <= budget.capacity, f"{budget.alive} alive, by count {alive}"

    async def _check_end(self, is_complete: bool) -> None:
        if (batcher := self.controller._batcher) is not None:
            self.set_aside |= {told["prompt"] for told in batcher._prompts_set_aside}
            assert not batcher._tasks and batcher._sequences == 0, (batcher._tasks, batcher._sequences)
            if is_complete:
                self._check_counts()
                assert batcher.budget.alive == 0 == len(batcher._alive)
                drawn = batcher.cursor.state()["drawn"]
                check_trained(self.schedule, self.trained, drawn, self.set_aside)
        for kind, workers in self.controller._workers_by_kind.items():
            given = {m.info.worker_id: (m.sequences, m.tokens) for m in workers.registry._members.values()}
            assert set(given.values()) <= {(0, 0)}, f"of {kind} workers is still taken: {given}"
            for worker_id in list(workers.by_id):
                await self.controller.deregister(kind, worker_id, "the end")
            assert not workers.registry.members() and not workers.by_id
        for _ in range(20):  # who was told of a loss does what there is to do
            await asyncio.sleep(0)
        for link in (link for worker in self.workers for link in worker.links):
            assert link.is_closed and link.open == 0, (
                f"{link.name}: {link.open} open, closed: {link.is_closed}"
            )
