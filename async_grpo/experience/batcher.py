"""`ExperienceBatcher`: the rollout loop. It admits prompts, has them generated and scored, and feeds the ranks.

rollout_loop:  waits for a slot of the staleness budget, then starts each rollout as its own task
rollout:       generates a group, scores each completion as soon as it ends, and adds the log-probs of other policies
_offer:        places the group in a step, computes advantages, packs micro-batches, and queues them for the ranks
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from async_grpo.errors import DeadlineExceeded, PromptSetAside, RunFailed
from async_grpo.experience.config import NO_FACTS, BatchConfig, RunFacts
from async_grpo.experience.curriculum import make_curriculum
from async_grpo.experience.dataset import PromptCursor, Question
from async_grpo.experience.group_advantages import GroupAdvantages
from async_grpo.experience.packing import Packer
from async_grpo.experience.rollouts import Rollouts
from async_grpo.experience.run_images import RunImages
from async_grpo.experience.staleness import FirstStepPace, StepAssembler, StepComplete, make_budget
from async_grpo.experience.state import ExperienceState, UnfinishedGroup
from async_grpo.experience.step_metrics import (
    EngineUtilization,
    StepAlarms,
    groups_to_show,
    readable_samples,
    refuse_unscored,
    step_stats,
)
from async_grpo.messages import Message, SaveRequested, StepEnd, WorkersJoined
from async_grpo.processes.waits import waiting
from async_grpo.protocols import Generation, Logprobs, Verification
from async_grpo.types import Group, Prompt

# An entry in a rank's queue. The end of a step is queued as a task, because the statistics in its StepEnd come later
Queued = Message | asyncio.Task[StepEnd]
# A prompt is set aside if several engines were lost while they processed it. After this many prompts in a row, the next
# one ends the run, because the cause is then probably not in the prompts
MAX_SET_ASIDE_IN_A_ROW = 2


class ExperienceBatcher:
    """Owns the prompt cursor, the staleness budget and the queues of the ranks. Create it in a running event loop.

    Args:
        config: The run's options for batches, steps and rewards.
        questions: The data set from which prompts are drawn.
        generation: Source of completions.
        verification: Source of verdicts.
        reference: Source of the reference policy's log-probs; None if the loss needs none.
        proximal: Source of the proximal policy's log-probs; None if the loss needs none.
        num_ranks: Number of trainer ranks; each calls `next_message` for its own messages.
        teachers: Source of each teacher's log-probs, by name; None without a teacher.
        facts: Facts about the run's rewards and model, from `ResolvedRewards.facts`.
        more_stats: Returns additional numbers for each step's statistics.
        before_step: Awaited before the ranks get a step that is trained as a whole, for example to let engines sleep.
        images: The files of the run's images. Environments add images to them.
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
        teachers: Mapping[str, Logprobs] | None = None,
        num_ranks: int = 1,
        facts: RunFacts = NO_FACTS,
        more_stats: Callable[[], Mapping[str, Any]] = dict,
        before_step: Callable[[], Awaitable[None]] | None = None,
        images: RunImages | None = None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.generation = generation
        self.verification = verification
        self._more_stats = more_stats
        self._before_step = before_step
        self.rollouts = Rollouts(
            config,
            facts,
            generation,
            verification,
            reference,
            proximal,
            on_change=self._count_sequences,
            teachers=teachers,
        )
        self.evaluate = self.rollouts.evaluate
        curriculum = make_curriculum(config, [question.row for question in questions])
        self.cursor = PromptCursor(questions, config.infinite_sampler_seed, curriculum)
        self._images = images or RunImages(questions, facts.kept_images)
        self.plan = config.pass_plan
        self.budget = make_budget(config)
        self.advantages = GroupAdvantages(config, facts)
        self.packer = _make_packer(config, facts, num_ranks)
        whole_steps = config.trains_whole_steps
        self.steps = StepAssembler(self.budget, self.packer, self.advantages, whole_steps=whole_steps)
        self.utilization = EngineUtilization()
        self._alarms = StepAlarms(config, facts.best_rewards)

        self._queues: list[asyncio.Queue[Queued]] = [asyncio.Queue() for _ in range(num_ranks)]
        self._tasks: set[asyncio.Task] = set()
        self._offer_lock = asyncio.Lock()
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

        self._sequences = 0  # number of sequences that are requested and not completely generated
        self._first_step = FirstStepPace(config.samples_per_step)
        self._admitted = 0  # number of groups admitted since the start of the run
        # The groups that are alive, by sequence number. Checkpoints save these groups
        self._alive: dict[int, Group | UnfinishedGroup] = {}
        # Sequence numbers of the groups on which a version of the weights was trained, for versions that are not live yet
        self._trained_groups: dict[int, list[int]] = {}
        self._samples_done = 0  # number of samples of all steps that have ended
        self._prompts_set_aside: list[dict[str, Any]] = []  # prompts set aside since the end of the last step
        self._num_set_aside_in_a_row = 0  # number of prompts set aside since the last finished group

    async def start(self) -> None:
        """Start generating, or continue after `restore`. The engines must have the policy of the next training step."""
        self.utilization.take()  # discards the time before the start, in which the engines could not work
        await self._images.write_all(group.prompt for group in self._alive.values())
        for number, group in self._alive.items():
            coroutine = self._offer(group) if isinstance(group, Group) else self.rollout(number)
            self._supervise(coroutine, f"the rollout of group {number}")
        self._supervise(self.rollout_loop(), "the rollout loop")
        self._supervise(self._save_regularly(), "the timer of checkpoints")

    async def next_message(self, rank: int) -> Message:
        """Wait for the next message of a rank.

        Raises:
            RunFailed: A task of the batcher failed. The task's error is the cause.
            DeadlineExceeded: No message came for `experience_timeout_s` seconds.
        """
        message_task = asyncio.ensure_future(self._next_message(rank))
        awaited: set[asyncio.Future[Any]] = {message_task, self._failure}
        timeout_s = self.config.experience_timeout_s
        try:
            await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                error = self._failure.result()
                raise RunFailed(f"{type(error).__name__}: {error}") from error
            if not message_task.done():
                task_names = sorted(task.get_name() for task in self._tasks)
                raise DeadlineExceeded(
                    f"rank {rank} waited {timeout_s:.0f} s (--experience-timeout-s) for step {self.steps.step}: "
                    f"{self._sequences} sequences are generating, {len(task_names)} tasks are under way: "
                    f"{', '.join(task_names[:3])} ..."
                )
            return message_task.result()
        finally:
            message_task.cancel()

    async def _next_message(self, rank: int) -> Message:
        # While `_offer` has the lock, it uses the packer. Before it releases the lock, it feeds the queues itself
        if not self._offer_lock.locked():
            self._feed()
        message = await self._queues[rank].get()
        if isinstance(message, asyncio.Task):
            return await asyncio.shield(message)
        return message

    async def weights_live(self, version: int) -> None:
        """Free the slots of the groups that trained policy `version`, because all engines now use this policy."""
        sequence_numbers = self._trained_groups.pop(version, [])
        for number in sequence_numbers:
            del self._alive[number]
        self.advantages.weights_live(version)
        self._images.remove_unused(group.prompt for group in self._alive.values())
        await self.budget.weights_live(version, groups=len(sequence_numbers))
        if sequence_numbers:  # empty for the initial weights, before the first step
            self._first_step.end()
        self._note_utilization()

    def workers_joined(self) -> None:
        """Queue the message that workers wait for weights, at the same position for all ranks."""
        self._put([WorkersJoined()] * len(self._queues))

    def request_save(self, end_reason: str = "") -> None:
        """Queue the request to save a checkpoint, at the same position for all ranks.

        Args:
            end_reason: Why the run ends after the checkpoint; "" if the run continues.
        """
        self._put([SaveRequested(end_reason)] * len(self._queues))

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.config.checkpoint_every_s)
            self.request_save()

    def state(self, step: int) -> ExperienceState:
        """Return the state from which a run resumes at `step`. The policy of that step must be live."""
        assert step == self.budget.live_version, (step, self.budget.live_version)
        running_means = self.advantages.memory(step)
        return ExperienceState(step, self._admitted, self.cursor.state(), dict(self._alive), running_means)

    def restore(self, state: ExperienceState) -> None:
        """Restore a saved state, so that `start` continues where the saved batcher stopped."""
        self._admitted = state.admitted
        minibatch = self.plan.next_minibatch(state.step)
        self._samples_done = minibatch * self.config.samples_per_step
        self._alive = dict(sorted(state.alive.items()))
        self._images.restore(group for group in state.alive.values() if isinstance(group, Group))
        self.cursor.restore(state.cursor)
        self.advantages.restore(state.running_means)
        self.budget.restore(state.step, len(state.alive))
        self.steps.restore(minibatch, state.admitted, state.alive)

    async def close(self) -> None:
        """Cancel all tasks, which aborts their requests in the engines."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def rollout_loop(self) -> None:
        """Admit all groups of the run one by one, each as soon as the staleness budget has a free slot."""
        while self._admitted < self.config.num_groups:
            with waiting("slot", "the rollout loop", "the first step's completions"):
                await self._first_step.wait_for_room()
            with waiting("slot", "the rollout loop", "a slot of the staleness budget"):
                await self.budget.admit()
            number = self._admitted
            self._admitted += 1
            self._alive[number] = UnfinishedGroup(next(self.cursor))
            self._first_step.admitted(self.config.samples_per_question)
            self._supervise(self.rollout(number), f"the rollout of group {number}")

    async def rollout(self, number: int) -> None:
        """Generate, score and pack one group. If it is unfit for training, replace it by a group of the next prompt."""
        while True:
            admitted = self._alive[number]
            await self._images.write(admitted.prompt)
            try:
                # `admit` may have returned an older version, because a restored or replaced group starts later
                start_version = self.budget.live_version
                group = await self.rollouts.group(admitted.prompt, number, start_version)
            except PromptSetAside as error:
                self._set_aside(admitted.prompt, error)
                self._alive[number] = UnfinishedGroup(next(self.cursor), admitted.resampled)
                continue
            self._num_set_aside_in_a_row = 0
            group = replace(group, resampled=admitted.resampled)
            self._learn_difficulty(group)
            if self._is_fit(group) or group.resampled == self.config.max_resamples:
                break
            self._alive[number] = UnfinishedGroup(next(self.cursor), group.resampled + 1)
        group = self.advantages.with_group_mean(group)
        group = await self.rollouts.add_logprobs(group)
        # `_offer` waits only until the groups that were offered earlier are packed. It does not wait for a place in a step:
        # a group without one stays in the `StepAssembler`
        with waiting("step", f"group {number}", "its step"):
            await self._offer(group)

    def _set_aside(self, prompt: Prompt, error: PromptSetAside) -> None:
        """Record a prompt that is excluded from the run, because several engines were lost while they processed it.

        Raises:
            PromptSetAside: Too many prompts were set aside in a row, so the prompts are probably not the cause.
        """
        self._num_set_aside_in_a_row += 1
        if self._num_set_aside_in_a_row > MAX_SET_ASIDE_IN_A_ROW:
            raise error
        self._prompts_set_aside.append({"prompt": prompt.ordinal, "reason": str(error), "row": prompt.row})

    def _learn_difficulty(self, group: Group) -> None:
        """Retire the question if it is solved, and tell the curriculum the group's mean reward."""
        mean_reward = self.advantages.mean_reward(group)
        if mean_reward is None:
            return
        solved_above = self.config.retire_solved_above
        if solved_above is not None and mean_reward >= solved_above:
            self.cursor.retire(group.prompt)
        if self.cursor.curriculum is not None:
            self.cursor.curriculum.observe(group.prompt.row, mean_reward)

    def _is_fit(self, group: Group) -> bool:
        """Return whether the group may be trained, or must be replaced (`--zero-variance`, `--on-reward-failure`)."""
        if self.config.zero_variance == "resample" and not self.advantages.has_signal(group):
            return False
        return not self.advantages.wants_refill(group)

    async def _offer(self, group: Group) -> None:
        """Accept a finished group. Queue full micro-batches and, if its step is complete, the end of the step."""
        self._alive[group.sequence_number] = group
        # `steps.offer` may run in a thread: the lock keeps other groups out until its events are queued
        async with self._offer_lock:
            if self.steps.streams:
                events = self.steps.offer(group)
            else:
                # Processing a whole minibatch takes long, so a thread does it while the event loop serves other tasks
                events = await asyncio.to_thread(self.steps.offer, group)
                if events and self._before_step is not None:
                    await self._before_step()
            for event in events:
                if isinstance(event, StepComplete):
                    self._end_step(event)
                else:
                    self._put(event)
            self._feed()

    def _end_step(self, complete: StepComplete) -> None:
        """Put the end of a step into every queue. A task computes its statistics later."""
        if not self.advantages.estimator.ignores_rewards:
            refuse_unscored(complete.step, complete.groups)
        self.rollouts.refuse_untaught(complete.step, complete.groups)
        # `last_step` is the last step of the minibatch's cycle, after which the engines get new weights
        version_after_cycle = self.plan.last_step(complete.step) + 1
        trained_groups = self._trained_groups.setdefault(version_after_cycle, [])
        trained_groups += [group.sequence_number for group in complete.groups]
        step_end = self._supervise(self._step_end(complete), f"the end of step {complete.step}")
        self._put([step_end] * len(self._queues))

    def _feed(self) -> None:
        """Queue one micro-batch for each rank if a queue is empty and the waiting samples fill every micro-batch.

        Otherwise all samples wait, because packing improves with the number of samples to choose from.
        """
        if not any(queue.empty() for queue in self._queues):
            return
        micro_batches = self.packer.full_round()
        if micro_batches is not None:
            self._put(micro_batches)

    def _put(self, messages: Sequence[Queued]) -> None:
        """Append one message to the queue of each rank."""
        for queue, message in zip(self._queues, messages, strict=True):
            queue.put_nowait(message)

    async def _step_end(self, complete: StepComplete) -> StepEnd:
        self._samples_done += sum(len(group.samples) for group in complete.groups)
        generation = await self.generation.take_stats()
        verification = await self.verification.take_stats()
        workers_lost = generation.pop("workers_lost", [])
        spans = generation.pop("spans", [])
        busy = generation.pop("busy")

        optimizer_step = self.plan.first_step(complete.step)  # first step that trains this minibatch
        stats = step_stats(optimizer_step, complete.groups, self._samples_done, self.config.steps_per_batch)
        stats["groups_without_signal"] = self.advantages.num_without_signal(complete.groups)
        stats |= self.rollouts.teacher_stats(complete.groups)
        stats["questions_retired"] = len(self.cursor.retired)
        if self.cursor.curriculum is not None:
            stats |= self.cursor.curriculum.metrics()
        stats["spans"] = [*spans, *self.rollouts.spans.take()]
        stats |= self.utilization.take(busy)
        stats |= generation
        stats |= verification
        stats |= self._more_stats()
        alarms = self._alarms.of_step(complete.groups, verification.get("verifiers", {}))
        stats["alarms"] = workers_lost + alarms
        stats["prompts_set_aside"] = self._prompts_set_aside
        self._prompts_set_aside = []
        if self.config.samples_filename is not None:
            shown_groups = groups_to_show(self.config, complete.groups)
            stats["samples"] = readable_samples(self._images.keep(shown_groups))
        return StepEnd(complete.step, len(complete.groups), stats["samples_in_batch"], stats)

    def _supervise(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a coroutine as a task, and end the run if it fails."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the run: `next_message` raises `error` as a `RunFailed`."""
        if not self._failure.done():
            self._failure.set_result(error)

    def _count_sequences(self, change: int) -> None:
        """Add to the number of sequences that are being generated."""
        self._sequences += change
        if change < 0:
            # This also counts completions of evaluations and of replaced groups, which were never counted as admitted.
            # So the first step may start more completions than it needs, which does no harm
            self._first_step.generated(-change)
        self._note_utilization()

    def _note_utilization(self) -> None:
        self.utilization.set(sequences=self._sequences, free_slots=self.budget.free)


def _make_packer(config: BatchConfig, facts: RunFacts, num_ranks: int) -> Packer:
    return Packer(num_ranks, config.max_tokens_per_gpu, facts.hidden_size, longest_first=config.longest_first)
