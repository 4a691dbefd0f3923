"""`RemoteExperience`: the run's controller as a rank sees it; on rank 0 its start, and the evaluations beside the steps."""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from async_grpo.cluster.ray_session import CONTROL_TIMEOUT_S, answer
from async_grpo.cluster.reward_actors import RunVerification
from async_grpo.config.preflight import Prepared
from async_grpo.config.run import RunConfig
from async_grpo.environments.make import make_played, source_of
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.experience.dataset import Question
from async_grpo.messages import Message, MicroBatch
from async_grpo.metrics.console import means_of, show_waiting
from async_grpo.metrics.tail import last_records
from async_grpo.metrics.writer import EVAL_FILE, as_json
from async_grpo.processes.untrusted_files import read_bytes

SITUATION_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)
BUDGET_FILE = "judge_budget.jsonl"
MAX_BUDGET_BYTES = 1 << 30  # a call takes about 50


@dataclass
class RemoteExperience:
    """`ExperienceSource` of one rank: fetches the next message while the rank computes on the last one.

    Where there are questions for it, on rank 0, it evaluates before the first step, every `eval_every`, and at the end:
    one evaluation at a time, whose errors end no run.
    """

    config: RunConfig
    controller: Any
    rank: int
    eval_questions: Mapping[str, Sequence[Question]]
    resumed_at: int = 0  # the steps done when this start began

    def __post_init__(self) -> None:
        self._questions = ray.put(dict(self.eval_questions)) if self.eval_questions else None
        self._next: Any = None
        self._evaluation: tuple[int, Any] | None = None  # of which step, and its answer
        self._found: dict[str, Any] = {}  # for the next step's metrics
        self.told_to_end = threading.Event()  # then no evaluation is waited for

    def start(self) -> None:
        """Evaluate the policy that the run starts with, then begin to generate.

        Training waits for this evaluation, so that one policy gives all of its answers: it is what later evaluations are
        compared with.
        """
        if self._is_start_evaluation_due():
            self._begin_evaluation(self.resumed_at, is_training_waiting=True)
            self._end_evaluation(wait_until=time.monotonic() + self.config.experience_timeout_s)
        if self.rank == 0:
            answer(self.controller.start.remote())

    def _is_start_evaluation_due(self) -> bool:
        """Return whether the last evaluation that was due is missing, as it is if the run ended meanwhile."""
        every = self.config.eval_every
        due_step = self.resumed_at - self.resumed_at % every if every else 0
        evaluations = last_records(self.config.output_path / EVAL_FILE, 1000)
        return all(evaluation["step"] < due_step for evaluation in evaluations)

    def next_message(self, rank: int) -> Message:
        """The next message; raises what the batcher raises."""
        self._next = self._next or self.controller.next_message.remote(rank)
        # The batcher's own deadline has the better message
        message = answer(self._next, self.config.experience_timeout_s + CONTROL_TIMEOUT_S)
        # Not beyond the step: the batcher's deadline would run while the trainer steps, syncs and evaluates
        ahead = isinstance(message, MicroBatch)
        self._next = self.controller.next_message.remote(rank) if ahead else None
        return message

    def situation(self) -> dict[str, Any]:
        """Who waits for whom in the controller; an AsyncGrpoError if it does not tell at once."""
        return dict(answer(self.controller.situation.remote(), SITUATION_TIMEOUT_S))

    def after_step(self, step: int) -> dict[str, Any]:
        """Begin an evaluation, if one is due; the metrics of one that has ended meanwhile."""
        is_due = self.config.evaluation_is_due(step, self.config.num_steps)
        is_last = step == self.config.num_steps
        is_training_waiting = is_due and (is_last or self.config.eval_pinned)
        wait_until = 0.0
        if is_training_waiting:
            wait_until = time.monotonic() + self.config.experience_timeout_s
        self._end_evaluation(wait_until)
        if is_due:
            self._begin_evaluation(step, is_training_waiting)
            self._end_evaluation(wait_until)
        found, self._found = self._found, {}
        return found

    def _begin_evaluation(self, step: int, is_training_waiting: bool) -> None:
        """Begin an evaluation; while training waits, it has all engines to itself."""
        if self._questions is None:
            return
        if self._evaluation is not None:
            log.warning("step %d is not evaluated: step %d still is", step, self._evaluation[0])
            return
        log.info("evaluating at step %d", step)
        config = dataclasses.replace(self.config, eval_pinned=is_training_waiting)
        self._evaluation = step, self.controller.evaluate.remote(self._questions, config)

    def _end_evaluation(self, wait_until: float = 0.0) -> None:
        """Write down an evaluation that has ended, or ends in time."""
        if self._evaluation is None:
            return
        step, asked = self._evaluation
        with show_waiting(f"waiting for the evaluation at step {step}") if wait_until else nullcontext():
            while not ray.wait([asked], timeout=0)[0]:
                if time.monotonic() >= wait_until or self.told_to_end.wait(0.1):
                    if wait_until:
                        log.error("the evaluation of step %d has not ended: the run goes on without", step)
                    return
        self._evaluation = None
        try:
            results = answer(asked)
            for name, result in results.items():
                found = write_evaluation(self.config.output_path / EVAL_FILE, step, name, result)
                prefix = f"eval_{name}_" if name else "eval_"
                self._found |= {f"{prefix}{key}": value for key, value in found.items()}
        except (AsyncGrpoError, OSError) as error:
            log.error("the evaluation of step %d failed; the run goes on: %s", step, error)
            return
        seconds = sum(result["seconds"] for result in results.values())
        self._found |= {"eval_step": step, "eval_seconds": self._found.get("eval_seconds", 0.0) + seconds}


def write_evaluation(
    path: Path, step: int, name: str, result: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """Append what was found on the file of that name to `path`, and say it; the samples go beside. Returns the numbers."""
    numbers = {key: value for key, value in result.items() if key not in ("samples", "seconds")}
    line = {"step": step, **({"file": name} if name else {}), **more, "seconds": result["seconds"]}
    with path.open("a", encoding="utf-8") as lines:
        lines.write(as_json(line | {f"eval_{key}": value for key, value in numbers.items()}))
    samples = path.with_name(f"eval_samples_{step}{f'_{name}' if name else ''}.jsonl")
    samples.write_text("".join(map(as_json, result["samples"])), encoding="utf-8")
    first, last = result["version_min"], result["version_max"]
    between = f"policy {first}" if first == last else f"policies {first} to {last}"
    what = f"held-out{f' {name}' if name else ''} at step {step}"
    found = ", ".join(f"{mean} {value}" for mean, value in means_of(numbers).items()) or "-"
    scored, asked = result["num_reward_ok"], result["num_samples"]
    log.info("%s: %s; %d of %d samples scored, %s", what, found, scored, asked, between)
    return numbers


def start_batcher(controller: Any, prepared: Prepared, num_ranks: int = 1) -> Any:
    """Have rewards and batcher made in the controller; returns its answer, to wait for."""
    config, rewards = prepared.config, prepared.rewards
    assert rewards is not None
    if config.verdict_cache:  # the controller opens it, in another folder
        config = dataclasses.replace(config, verdict_cache=os.path.abspath(config.verdict_cache))
    folder = Path(prepared.settings.checkpoint) if prepared.settings.checkpoint else None
    budget_path = None if config.judge_budget is None else str(config.output_path.absolute() / BUDGET_FILE)
    if budget_path and folder and not Path(budget_path).exists():  # it goes on in another folder
        spent = folder.parents[1] / BUDGET_FILE
        if spent.exists():
            try:
                record = read_bytes(spent, MAX_BUDGET_BYTES)
            except OSError as error:
                raise ConfigurationError(f"the record of spending {spent} cannot be read: {error}") from error
            Path(budget_path).write_bytes(record)
    secrets, environment = rewards.secrets(), config.reward_environment()
    verification = partial(RunVerification, rewards.source, config, budget_path, secrets, environment)
    play = None
    if config.environment is not None:
        # Of more, a rank could not train it
        most = min(prepared.settings.max_total_tokens, config.max_tokens_per_gpu)
        settings = dataclasses.replace(prepared.settings, max_total_tokens=most)
        about = config.model_name_or_path, settings, source_of(config.environment)
        play = partial(
            make_played, config, *about, folder=config.output_path.absolute(), variables=environment
        )
    given = config, prepared.facts, num_ranks, ray.put(prepared.questions), verification, folder, play
    return controller.start_batcher.remote(*given)
