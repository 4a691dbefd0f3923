"""`RemoteExperience`: the run's controller as a rank sees it; on rank 0 its start, and the evaluations beside the steps."""

import dataclasses
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import ray

from async_grpo.cluster.ray_session import CONTROL_TIMEOUT_S, answer
from async_grpo.cluster.reward_actors import RunVerification
from async_grpo.config.preflight import Prepared
from async_grpo.config.run import RunConfig
from async_grpo.errors import AsyncGrpoError
from async_grpo.experience.dataset import Question
from async_grpo.metrics.console import means_of, waiting
from async_grpo.metrics.tail import last_records
from async_grpo.metrics.writer import EVAL_FILE, as_json
from async_grpo.types import Message, MicroBatch

SITUATION_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)
BUDGET_FILE = "judge_budget.jsonl"


class RemoteExperience:
    """`ExperienceSource` of one rank: fetches the next message while the rank computes on the last one.

    Where there are questions for it, on rank 0, it evaluates before the first step, every `eval_every`, and at the end:
    one evaluation at a time, whose errors end no run. `resumed_at`: the steps done when this start began; 0: none.
    """

    def __init__(
        self,
        config: RunConfig,
        controller: Any,
        rank: int,
        eval_questions: Mapping[str, Sequence[Question]],
        *,
        resumed_at: int = 0,
    ) -> None:
        self._config, self._controller, self._rank, self._begin = config, controller, rank, resumed_at
        self._questions = ray.put(dict(eval_questions)) if eval_questions else None
        self._next: Any = None
        self._evaluation: tuple[int, Any] | None = None  # of which step, and its answer
        self._found: dict[str, Any] = {}  # for the next step's metrics
        self.told_to_end = threading.Event()  # then no evaluation is waited for

    def start(self) -> None:
        every = self._config.eval_every
        due = self._begin - self._begin % every if every else 0
        done = last_records(self._config.output_path / EVAL_FILE, 1000)
        if not any(
            line["step"] >= due for line in done
        ):  # one that was under way when the run ended is lacking
            self._begin_evaluation(self._begin)
            if self._config.eval_pinned:
                self._end_evaluation(wait_until=time.monotonic() + self._config.experience_timeout_s)
        if self._rank == 0:
            answer(self._controller.start.remote())

    def next_message(self, rank: int) -> Message:
        """The next message; raises what the batcher raises."""
        self._next = self._next or self._controller.next_message.remote(rank)
        # The batcher's own deadline has the better message
        message = answer(self._next, self._config.experience_timeout_s + CONTROL_TIMEOUT_S)
        # Not beyond the step: the batcher's deadline would run while the trainer steps, syncs and evaluates
        ahead = isinstance(message, MicroBatch)
        self._next = self._controller.next_message.remote(rank) if ahead else None
        return message

    def situation(self) -> dict[str, Any]:
        """Who waits for whom in the controller; an AsyncGrpoError if it does not tell at once."""
        return dict(answer(self._controller.situation.remote(), SITUATION_TIMEOUT_S))

    def after_step(self, step: int) -> dict[str, Any]:
        """Begin an evaluation, if one is due; the metrics of one that has ended meanwhile."""
        config = self._config
        waits = step == config.num_steps or config.eval_pinned
        wait_until = waits * (time.monotonic() + config.experience_timeout_s)
        if config.evaluation_is_due(step, config.num_steps):
            self._end_evaluation(wait_until)
            self._begin_evaluation(step)
            self._end_evaluation(wait_until)
        else:
            self._end_evaluation()
        found, self._found = self._found, {}
        return found

    def _begin_evaluation(self, step: int) -> None:
        if self._questions is None:
            return
        if self._evaluation is not None:
            log.warning("step %d is not evaluated: step %d still is", step, self._evaluation[0])
            return
        log.info("evaluating at step %d", step)
        self._evaluation = step, self._controller.evaluate.remote(self._questions, self._config)

    def _end_evaluation(self, wait_until: float = 0.0) -> None:
        """Write down an evaluation that has ended, or ends in time."""
        if self._evaluation is None:
            return
        step, asked = self._evaluation
        with waiting(f"waiting for the evaluation at step {step}") if wait_until else nullcontext():
            while not (is_done := bool(ray.wait([asked], timeout=0)[0])):
                if time.monotonic() >= wait_until or self.told_to_end.wait(0.1):
                    break
        if not is_done:
            if wait_until:
                log.error("the evaluation of step %d has not ended: the run goes on without", step)
            return
        self._evaluation = None
        try:
            results = answer(asked)
            for name, result in results.items():
                found = write_evaluation(self._config.output_path / EVAL_FILE, step, name, result)
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
    _say(step, name, numbers)
    return numbers


def _say(step: int, name: str, result: Mapping[str, Any]) -> None:
    between = f"policies {result['version_min']} to {result['version_max']}"
    if result["version_min"] == result["version_max"]:
        between = f"policy {result['version_min']}"
    what = f"held-out{f' {name}' if name else ''} at step {step}"
    found = ", ".join(f"{mean} {value}" for mean, value in means_of(result).items()) or "-"
    scored, asked = result["num_reward_ok"], result["num_samples"]
    log.info("%s: %s; %d of %d samples scored, %s", what, found, scored, asked, between)


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
            shutil.copyfile(spent, budget_path)
    secrets, environment = rewards.secrets(), config.reward_environment()
    verification = partial(RunVerification, rewards.source, config, budget_path, secrets, environment)
    given = config, prepared.facts, num_ranks, ray.put(prepared.questions), verification, folder
    return controller.start_batcher.remote(*given)
