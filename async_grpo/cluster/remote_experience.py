"""`RemoteExperience`: fetches a rank's messages from the run's controller, and runs the evaluations on rank 0."""

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from async_grpo.cluster.ray_session import CONTROL_TIMEOUT_S, answer
from async_grpo.cluster.reward_actors import RunVerification
from async_grpo.cluster.teacher_servers import TeacherServers, compared_tokens
from async_grpo.config.preflight import Prepared
from async_grpo.config.run import RunConfig
from async_grpo.environments.make import make_played, source_of
from async_grpo.environments.played import Played
from async_grpo.errors import AsyncGrpoError, ConfigurationError
from async_grpo.experience.dataset import Question
from async_grpo.messages import Message, MicroBatch, SharedRunSettings
from async_grpo.metrics.console import means_of, show_waiting
from async_grpo.metrics.tail import last_records
from async_grpo.metrics.writer import EVAL_FILE, as_json
from async_grpo.modeling.load import load_tokenizer
from async_grpo.processes.image_files import RUN_IMAGES
from async_grpo.processes.untrusted_files import read_bytes

SITUATION_TIMEOUT_S = 5.0
MAX_EVALUATIONS_READ = 1000
BUDGET_FILE = "judge_budget.jsonl"
MAX_BUDGET_BYTES = 1 << 30  # largest budget file that is read; each call of a judge adds about 50 bytes
log = logging.getLogger(__name__)


@dataclass
class RemoteExperience:
    """`ExperienceSource` of one rank. It fetches the next message while the rank processes the current one.

    On rank 0 it may have held-out questions, which it evaluates before the first step, every `eval_every` steps, and at
    the end. Only one evaluation runs at a time. An error in an evaluation does not end the run.
    """

    config: RunConfig
    controller: Any
    rank: int
    eval_questions: Mapping[str, Sequence[Question]]  # held-out questions, by name of their file
    resumed_at: int = 0  # number of steps that were completed when this process started

    def __post_init__(self) -> None:
        self._questions = ray.put(dict(self.eval_questions)) if self.eval_questions else None
        self._next: Any = None  # Ray reference to the next message while it is being fetched; else None
        # Step and Ray reference to the results of the evaluation that is running; None if none is
        self._evaluation: tuple[int, Any] | None = None
        # Results of ended evaluations, which are added to the metrics of the next step
        self._eval_metrics: dict[str, Any] = {}
        # Set when the run is asked to end. From then on, training does not wait for evaluations
        self.told_to_end = threading.Event()

    def start(self) -> None:
        """Evaluate the initial policy if that is due, then start generating; see `ExperienceSource`.

        Training waits for this evaluation. So all its completions come from the initial policy, and its results are the
        baseline for later evaluations.
        """
        if self._is_start_evaluation_due():
            self._begin_evaluation(self.resumed_at, is_training_waiting=True)
            self._end_evaluation(self._evaluation_deadline())
        if self.rank == 0:
            answer(self.controller.start.remote())

    def _is_start_evaluation_due(self) -> bool:
        """Return whether the last evaluation that was due has no results in the output folder.

        This is the case in a new run, and in a resumed run that had ended before the results were written.
        """
        eval_every = self.config.eval_every
        due_step = self.resumed_at - self.resumed_at % eval_every if eval_every else 0
        evaluations = last_records(self.config.output_path / EVAL_FILE, MAX_EVALUATIONS_READ)
        return all(evaluation["step"] < due_step for evaluation in evaluations)

    def next_message(self, rank: int) -> Message:
        """Wait for the next message; see `ExperienceSource`. Errors of the batcher are raised here."""
        if self._next is None:
            self._next = self.controller.next_message.remote(rank)
        # This timeout is longer than the batcher's, so that the batcher's error comes first: its message is more
        # helpful
        message = answer(self._next, self.config.experience_timeout_s + CONTROL_TIMEOUT_S)
        self._next = None
        # After the last message of a step, do not fetch the next one yet. The batcher's deadline would already run
        # while the trainer updates the policy, sends weights and evaluates
        if isinstance(message, MicroBatch):
            self._next = self.controller.next_message.remote(rank)
        return message

    def situation(self) -> dict[str, Any]:
        """Return what the controller waits for.

        Raises:
            AsyncGrpoError: The controller does not answer within a few seconds.
        """
        return dict(answer(self.controller.situation.remote(), SITUATION_TIMEOUT_S))

    def after_step(self, step: int) -> dict[str, Any]:
        """Begin an evaluation if one is due, and return the metrics of evaluations that have ended."""
        is_due = self.config.evaluation_is_due(step, self.config.num_steps)
        is_last = step == self.config.num_steps
        is_training_waiting = is_due and (is_last or self.config.eval_pinned)
        deadline = self._evaluation_deadline() if is_training_waiting else None
        self._end_evaluation(deadline)
        if is_due:
            self._begin_evaluation(step, is_training_waiting)
            self._end_evaluation(deadline)
        metrics = self._eval_metrics
        self._eval_metrics = {}
        return metrics

    def _evaluation_deadline(self) -> float:
        """Return the time (`time.monotonic`) until which training waits for an evaluation that starts now."""
        return time.monotonic() + self.config.experience_timeout_s

    def _begin_evaluation(self, step: int, is_training_waiting: bool) -> None:
        """Begin an evaluation. If training waits for it, it uses all engines, otherwise only some."""
        if self._questions is None:
            return
        if self._evaluation is not None:
            log.warning(
                "step %d is not evaluated, because the evaluation of step %d still runs",
                step,
                self._evaluation[0],
            )
            return
        log.info("evaluating at step %d", step)
        config = dataclasses.replace(self.config, eval_pinned=is_training_waiting)
        self._evaluation = (step, self.controller.evaluate.remote(self._questions, config))

    def _end_evaluation(self, deadline: float | None = None) -> None:
        """Write the results of the current evaluation if it has ended or ends before the deadline."""
        if self._evaluation is None:
            return
        step, results_reference = self._evaluation
        if not self._wait_for_evaluation(step, results_reference, deadline):
            return
        self._evaluation = None
        metrics: dict[str, Any] = {}
        seconds = 0.0
        try:
            for name, result in answer(results_reference).items():
                numbers = write_evaluation(self.config.output_path / EVAL_FILE, step, name, result)
                prefix = f"eval_{name}_" if name else "eval_"
                metrics |= {f"{prefix}{key}": value for key, value in numbers.items()}
                seconds += result["seconds"]
        except (AsyncGrpoError, OSError) as error:
            log.error("the evaluation of step %d failed; the run goes on: %s", step, error)
            self._eval_metrics |= metrics
            return
        # Add to the metrics of another evaluation that ended after the same step, if there is one
        seconds += self._eval_metrics.get("eval_seconds", 0.0)
        self._eval_metrics |= {**metrics, "eval_step": step, "eval_seconds": seconds}

    def _wait_for_evaluation(self, step: int, results_reference: Any, deadline: float | None) -> bool:
        """Wait until the evaluation ends, the deadline passes, or the run is asked to end.

        Args:
            step: The step that is evaluated.
            results_reference: Reference to the evaluation's results.
            deadline: Time (`time.monotonic`) at which the wait ends; None does not wait.

        Returns:
            Whether the evaluation has ended.
        """
        if deadline is None:
            return _is_ready(results_reference)
        with show_waiting(f"waiting for the evaluation at step {step}"):
            while not _is_ready(results_reference):
                if time.monotonic() >= deadline or self.told_to_end.wait(0.1):
                    log.error("the evaluation of step %d has not ended: the run goes on without it", step)
                    return False
        return True


def _is_ready(reference: Any) -> bool:
    ready, _ = ray.wait([reference], timeout=0)
    return bool(ready)


def write_evaluation(
    path: Path, step: int, name: str, result: Mapping[str, Any], adapter: str = "", **entries: Any
) -> dict[str, Any]:
    """Write the result of an evaluation to files, and log it.

    Args:
        path: JSONL file to which a line is appended. The samples go to another file in the same folder.
        step: The step that was evaluated.
        name: Name of the evaluation file; "" if there is a single file without a name.
        result: A result of `Rollouts.evaluate`.
        adapter: Name of the evaluated adapter, if there are several.
        entries: Additional entries of the line.

    Returns:
        The numbers of the result, without the prefix `eval_`.
    """
    numbers = {key: value for key, value in result.items() if key not in ("samples", "seconds")}
    line: dict[str, Any] = {"step": step}
    if name:
        line["file"] = name
    if adapter:
        line["adapter"] = adapter
    line |= entries
    line["seconds"] = result["seconds"]
    line |= {f"eval_{key}": value for key, value in numbers.items()}
    with path.open("a", encoding="utf-8") as lines:
        lines.write(as_json(line))
    suffix = "".join(f"_{part}" for part in (adapter, name) if part)
    samples_path = path.with_name(f"eval_samples_{step}{suffix}.jsonl")
    samples_path.write_text("".join(map(as_json, result["samples"])), encoding="utf-8")
    _log_evaluation(step, f"{adapter} {name}".strip(), result, numbers)
    return numbers


def _log_evaluation(step: int, name: str, result: Mapping[str, Any], numbers: Mapping[str, Any]) -> None:
    first = result["version_min"]
    last = result["version_max"]
    log.info(
        "held-out%s at step %d: %s; %d of %d samples scored, %s",
        f" {name}" if name else "",
        step,
        ", ".join(f"{mean} {value}" for mean, value in means_of(numbers).items()) or "-",
        result["num_reward_ok"],
        result["num_samples"],
        f"policy {first}" if first == last else f"policies {first} to {last}",
    )


def start_batcher(controller: Any, prepared: Prepared, num_ranks: int = 1) -> Any:
    """Tell the controller to create the rewards, environment and batcher, and return a reference to its answer."""
    config = prepared.config
    rewards = prepared.rewards
    assert rewards is not None
    if config.verdict_cache:
        # The controller has another working directory, so make the path absolute
        config = dataclasses.replace(config, verdict_cache=os.path.abspath(config.verdict_cache))
    checkpoint = Path(prepared.settings.checkpoint) if prepared.settings.checkpoint else None
    environment = config.reward_environment()
    make_verification = partial(
        RunVerification,
        rewards.source,
        config,
        _budget_path(config, checkpoint),
        rewards.secrets(),
        environment,
    )
    return controller.start_batcher.remote(
        config,
        prepared.facts,
        num_ranks,
        ray.put(prepared.questions),
        make_verification,
        checkpoint=checkpoint,
        make_played=_environment_maker(config, prepared.settings, environment),
        make_servers=_teacher_maker(config, prepared.settings),
        images_folder=_images_folder(config, prepared.settings),
    )


def _images_folder(config: RunConfig, settings: SharedRunSettings) -> Path | None:
    """Return the folder of the run's images, or None if the model reads none."""
    # The controller has another working directory, so the path must be absolute
    return config.output_path.absolute() / RUN_IMAGES if settings.image_token_id >= 0 else None


def _teacher_maker(config: RunConfig, settings: SharedRunSettings) -> Callable[[], TeacherServers] | None:
    """Return a function that connects to the teachers on servers, or None if no teacher of the run is on a server."""
    if not config.teacher_servers or not settings.trains:
        return None
    variable = config.teacher_api_key_env
    return partial(
        TeacherServers,
        config,
        settings.max_total_tokens,
        compared_tokens(load_tokenizer(config.model_name_or_path), settings.max_total_tokens - 2),
        {variable: os.environ[variable]} if variable else {},
        config.verdict_cache,
    )


def _budget_path(config: RunConfig, checkpoint: Path | None) -> str | None:
    """Return the path of the file that records what the judges cost, or None without `--judge-budget`.

    If the run resumes from a checkpoint in another folder, that folder's file is copied to the new output folder.

    Raises:
        ConfigurationError: The file in the checkpoint's folder cannot be read.
    """
    if config.judge_budget is None:
        return None
    path = config.output_path.absolute() / BUDGET_FILE
    if checkpoint is not None and not path.exists():
        earlier_path = checkpoint.parents[1] / BUDGET_FILE
        if earlier_path.exists():
            try:
                record = read_bytes(earlier_path, MAX_BUDGET_BYTES)
            except OSError as error:
                raise ConfigurationError(
                    f"{earlier_path}, which records what the judges cost, cannot be read: {error}"
                ) from error
            path.write_bytes(record)
    return str(path)


def _environment_maker(
    config: RunConfig, settings: SharedRunSettings, variables: Mapping[str, str]
) -> Callable[..., Played] | None:
    """Return a function that connects the engines to the run's environment, or None if the run has no environment."""
    if config.environment is None:
        return None
    # A longer sequence would not fit into a micro-batch, so it could not be trained
    max_total_tokens = min(settings.max_total_tokens, config.max_tokens_per_gpu)
    return partial(
        make_played,
        config,
        config.model_name_or_path,
        dataclasses.replace(settings, max_total_tokens=max_total_tokens),
        source_of(config.environment),
        folder=config.output_path.absolute(),
        variables=variables,
    )
