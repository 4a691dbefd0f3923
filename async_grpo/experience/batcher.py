"""`ExperienceBatcher`: the rollout loop. It admits prompts, has them generated and scored, and feeds the ranks.

rollout_loop:  slot of the staleness budget -> rollout (a task each)
rollout:       prompt; generate; score each completion while its siblings still generate; reference log-probs
offer:         group -> step -> advantages -> packed micro-batches, when a rank has none -> one queue per rank
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_grpo.errors import DeadlineExceeded, PromptSetAside, RunFailed
from async_grpo.experience.config import NO_FACTS, BatchConfig, RunFacts
from async_grpo.experience.curriculum import make_curriculum
from async_grpo.experience.dataset import PromptCursor, Question
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer
from async_grpo.experience.rollouts import Rollouts
from async_grpo.experience.staleness import StalenessBudget, StepAssembler, StepComplete
from async_grpo.experience.state import ExperienceState, UnfinishedGroup
from async_grpo.experience.step_metrics import (
    EngineUtilization,
    StepAlarms,
    readable_samples,
    refuse_unscored,
    step_stats,
)
from async_grpo.messages import Message, SaveRequested, StepEnd, WorkersJoined
from async_grpo.processes.waits import waiting
from async_grpo.protocols import Generation, Logprobs, Verification
from async_grpo.types import Group, Prompt

Queued = Message | asyncio.Task[StepEnd]
SET_ASIDE_IN_A_ROW = 2  # prompts; with another one, something else than the prompts costs engines


class ExperienceBatcher:
    """Owner of the prompt cursor, the staleness budget and the queues of the ranks. Make it in an event loop.

    Args:
        questions: what prompts are drawn from.
        generation, verification: where completions and verdicts come from.
        reference, proximal: where their log-probs come from; None: the loss needs none.
        num_ranks: trainers that ask `next_message`, each for its own.
        facts: what was found out about model and rewards (`ResolvedRewards.facts`).
        more_stats: adds numbers to each step's.
    """

    def __init__(
        self,
        config: BatchConfig,
        questions: Sequence[Question],
        generation: Generation,
        verification: Verification,
        reference: Logprobs | None = None,
        proximal: Logprobs | None = None,
        *,
        num_ranks: int = 1,
        facts: RunFacts = NO_FACTS,
        more_stats: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.config, self.facts = config, facts
        self._more_stats = more_stats
        self.advantages = GroupAdvantages(config, facts)
        self.generation, self.verification = generation, verification
        sources = generation, verification, reference, proximal
        self.rollouts = Rollouts(config, facts, *sources, on_change=self._generating)
        self.evaluate = self.rollouts.evaluate
        curriculum = make_curriculum(config, [question.row for question in questions])
        self.cursor = PromptCursor(questions, config.infinite_sampler_seed, curriculum)
        self.budget = StalenessBudget(config.groups_per_step, config.max_staleness, config.groups_alive)
        self._alarms = StepAlarms(config, facts.best_rewards)
        self.packer = Packer(num_ranks, config.max_tokens_per_gpu, facts.hidden_size)
        parts = self.budget, self.packer, self.advantages
        self.steps = StepAssembler(*parts, whole_steps=config.deterministic)
        self.utilization = EngineUtilization()
        self._queues: list[asyncio.Queue[Queued]] = [asyncio.Queue() for _ in range(num_ranks)]
        self._tasks: set[asyncio.Task] = set()
        self._offering = asyncio.Lock()
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._sequences = 0  # admitted and still generating
        self._admitted = 0  # groups so far
        self._alive: dict[int, Group | UnfinishedGroup] = {}  # by sequence number: what a checkpoint keeps
        self._of_step: dict[int, list[int]] = {}  # sequence numbers, until the weights of that step are live
        self._samples_done = 0  # whose step has ended
        self._prompts_set_aside: list[dict[str, Any]] = []  # since the last step's end
        self._set_aside_in_a_row = 0  # without a group between them

    async def start(self) -> None:
        """Begin to generate, or go on with it. The engines must hold the policy of the step that is to be trained."""
        self.utilization.take()
        for number, group in self._alive.items():
            again = self._offer(group) if isinstance(group, Group) else self.rollout(number)
            self._supervise(again, f"the rollout of group {number}")
        self._supervise(self.rollout_loop(), "the rollout loop")
        self._supervise(self._save_regularly(), "the timer of checkpoints")

    async def next_message(self, rank: int) -> Message:
        """What this rank is told next. RunFailed: a task of the batcher failed; carries its error.

        DeadlineExceeded: nothing came for `experience_timeout_s` seconds.
        """
        message = asyncio.ensure_future(self._next_message(rank))
        either: set[asyncio.Future[Any]] = {message, self._failure}
        try:
            timeout_s = self.config.experience_timeout_s
            await asyncio.wait(either, timeout=timeout_s, return_when="FIRST_COMPLETED")
            if self._failure.done():
                error = self._failure.result()
                raise RunFailed(f"{type(error).__name__}: {error}") from error
            if not message.done():
                raise DeadlineExceeded(
                    f"rank {rank} waited {timeout_s:.0f} s (--experience-timeout-s) for step {self.steps.step}: "
                    f"{self._sequences} sequences are generating, {len(self._tasks)} tasks are under way: "
                    f"{', '.join(sorted(task.get_name() for task in self._tasks)[:3])} ..."
                )
            return message.result()
        finally:
            message.cancel()

    async def _next_message(self, rank: int) -> Message:
        if not self._offering.locked():  # or the packer is being filled, and who fills it feeds
            self._feed()
        message = await self._queues[rank].get()
        return await asyncio.shield(message) if isinstance(message, asyncio.Task) else message

    async def weights_live(self, version: int) -> None:
        """Every engine generates with policy `version`: the groups that it was trained on leave the budget."""
        trained = self._of_step.pop(version - 1, [])
        for number in trained:
            del self._alive[number]
        await self.budget.weights_live(version, groups=len(trained))
        self._generating(0)

    def workers_joined(self) -> None:
        """Let every rank know, at the same place among its messages."""
        self._put([WorkersJoined()] * len(self._queues))

    def request_save(self, end_reason: str = "") -> None:
        """Have every rank save, at the same place among its messages, and then end if there is a reason for it."""
        self._put([SaveRequested(end_reason)] * len(self._queues))

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.config.checkpoint_every_s)
            self.request_save()

    def state(self, step: int) -> ExperienceState:
        """What a run that resumes at `step` goes on with; the policy of that step must be live."""
        assert step == self.budget.live_version, (step, self.budget.live_version)
        return ExperienceState(step, self._admitted, self.cursor.state(), dict(self._alive))

    def restore(self, state: ExperienceState) -> None:
        """Go on as the batcher did that `state` is of, when `start` is called."""
        self._admitted, self._samples_done = state.admitted, state.step * self.config.samples_per_step
        self._alive = dict(sorted(state.alive.items()))
        self.cursor.restore(state.cursor)
        self.budget.restore(state.step, len(state.alive))
        self.steps.restore(state.step, state.admitted, state.alive)

    async def close(self) -> None:
        """Cancel everything that still runs; requests are aborted in the engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def rollout_loop(self) -> None:
        """Admit every group of the run, each as soon as the staleness budget allows."""
        while (number := self._admitted) < self.config.num_steps * self.config.groups_per_step:
            with waiting("slot", "the rollout loop", "a slot of the staleness budget"):
                await self.budget.admit()
            self._admitted, self._alive[number] = number + 1, UnfinishedGroup(next(self.cursor))
            self._supervise(self.rollout(number), f"the rollout of group {number}")

    async def rollout(self, number: int) -> None:
        """One group from prompt to micro-batches; one that will not do gives its place to the next prompt."""
        while True:
            admitted = self._alive[number]
            try:
                group = await self.rollouts.group(admitted.prompt, number, self.budget.live_version)
            except PromptSetAside as lost:
                self._set_aside(admitted.prompt, lost)
                self._alive[number] = UnfinishedGroup(next(self.cursor), admitted.resampled)
                continue
            self._set_aside_in_a_row = 0
            group = replace(group, resampled=admitted.resampled)
            reward, above = self.advantages.mean_reward(group), self.config.retire_solved_above
            if above is not None and reward is not None and reward >= above:
                self.cursor.retire(group.prompt)
            if self.cursor.curriculum is not None and reward is not None:
                self.cursor.curriculum.observe(group.prompt.row, reward)
            teaches = self.config.zero_variance != "resample" or self.advantages.has_signal(group)
            fits = teaches and not self.advantages.wants_refill(group)
            if fits or group.resampled == self.config.max_resamples:
                break
            self._alive[number] = UnfinishedGroup(next(self.cursor), group.resampled + 1)
        group = await self.rollouts.add_logprobs(self.advantages.with_group_mean(group))
        with waiting("step", f"group {number}", "its step"):
            await self._offer(group)

    def _set_aside(self, prompt: Prompt, lost: PromptSetAside) -> None:
        """Note a prompt that engines died of; raises its error if one after the other is such: then it is not they."""
        self._set_aside_in_a_row += 1
        if self._set_aside_in_a_row > SET_ASIDE_IN_A_ROW:
            raise lost
        self._prompts_set_aside.append({"prompt": prompt.ordinal, "reason": str(lost), "row": prompt.row})

    async def _offer(self, group: Group) -> None:
        """Hand out what follows from a finished group. A step's end is put in place at once, filled in later."""
        self._alive[group.sequence_number] = group
        async with self._offering:  # a minibatch may be in a thread: no other group may come in between
            if self.steps.streams:
                events = self.steps.offer(group)
            else:  # a whole minibatch at once is a thread's work, as the loop serves others
                events = await asyncio.to_thread(self.steps.offer, group)
            for event in events:
                if isinstance(event, StepComplete):
                    refuse_unscored(event.step, event.groups)
                    self._of_step[event.step] = [group.sequence_number for group in event.groups]
                    end = self._supervise(self._step_end(event), f"the end of step {event.step}")
                    self._put([end] * len(self._queues))
                else:
                    self._put(event)
            self._feed()

    def _feed(self) -> None:
        """A full round goes out when a rank has nothing left; until then it is packed the better the more there is."""
        if any(queue.empty() for queue in self._queues) and (micro_batches := self.packer.full_round()):
            self._put(micro_batches)

    def _put(self, messages: Sequence[Queued]) -> None:
        for queue, message in zip(self._queues, messages, strict=True):
            queue.put_nowait(message)

    async def _step_end(self, closed: StepComplete) -> StepEnd:
        self._samples_done += sum(len(group.samples) for group in closed.groups)
        generation = await self.generation.take_stats()
        lost = generation.pop("workers_lost", [])
        verification = await self.verification.take_stats()
        stats = {
            **step_stats(closed.step, closed.groups, self._samples_done, self.config.steps_per_batch),
            "groups_without_signal": sum(not self.advantages.has_signal(group) for group in closed.groups),
            "questions_retired": len(self.cursor.retired),
            **(self.cursor.curriculum.metrics() if self.cursor.curriculum else {}),
            "spans": [*generation.pop("spans", []), *self.rollouts.spans.take()],
            **self.utilization.take(generation.pop("busy")),
            **generation,
            **verification,
            **self._more_stats(),
            "alarms": lost + self._alarms.of_step(closed.groups, verification.get("verifiers", {})),
            "prompts_set_aside": self._prompts_set_aside,
        }
        self._prompts_set_aside = []
        if self.config.dump_samples_filename is not None:
            stats["samples"] = readable_samples(closed.groups)
        return StepEnd(closed.step, len(closed.groups), stats["samples_in_batch"], stats)

    def _supervise(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run it; its error ends the run."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """The run is over: `next_message` raises `error` as a `RunFailed`."""
        if not self._failure.done():
            self._failure.set_result(error)

    def _generating(self, change: int) -> None:
        """So many more sequences are under way, or slots have changed."""
        self._sequences += change
        self.utilization.set(sequences=self._sequences, free_slots=self.budget.free)
