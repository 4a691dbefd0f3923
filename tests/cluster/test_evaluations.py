"""Evaluations beside the steps: what is written of them; a step waits for none, and none that hangs ends a run."""

import asyncio
import json
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_policy
from controller_links import Link, link_to, worker
from fake_chain import STEPS, Chain, chain_config

from async_grpo.cluster.controller import RunController
from async_grpo.experience.config import EvaluationConfig
from async_grpo.experience.dataset import Question
from async_grpo.testing import FakeVerification
from async_grpo.types import Prompt

ray = pytest.importorskip("ray")
from async_grpo.cluster.ray_session import zero_cpu_actor  # noqa: E402 - after the check that ray is there
from async_grpo.cluster.remote_experience import RemoteExperience  # noqa: E402

QUESTIONS = [Question(np.array([5, 6], np.int32), {"input": "q", "answer": "x"}, "line")] * 3


class Controller:
    """Evaluations that end when they are let go."""

    def __init__(self) -> None:
        self._go_on = asyncio.Event()

    async def start(self) -> None:
        """Nothing generates."""

    async def let_go(self) -> None:
        self._go_on.set()

    async def evaluate(self, questions: Any, config: Any) -> dict[str, dict[str, Any]]:
        await self._go_on.wait()
        counts = {"num_reward_ok": 3, "num_samples": 3, "version_min": 0, "version_max": 1}
        found = {"avg_reward": 0.5, "avg_reward_ci": 0.25, **counts, "samples": [{"completion": "x"}]}
        return {name: {"seconds": 2.0, **found} for name in questions}


@pytest.fixture
def controller():
    actor = zero_cpu_actor(Controller).remote()
    ray.get(actor.start.remote(), timeout=60)  # its process is up
    yield actor
    ray.kill(actor)


def experience(controller, folder, *names, **changes) -> RemoteExperience:
    files = ",".join(f"{name}=x" for name in names)
    options = {"eval_data_path": files, "eval_every": 1, "num_training_batches": 3} | changes
    config = chain_config(**options, output_dir=str(folder))
    return RemoteExperience(config, controller, 0, dict.fromkeys(names, QUESTIONS))


@pytest.mark.real
@pytest.mark.usefixtures("ray_cluster")
class TestOnRay:
    def test_a_step_does_not_wait_for_an_evaluation_and_the_last_one_is_left_out_if_it_hangs(
        self, controller, tmp_path, caplog, monkeypatch
    ):
        monkeypatch.setattr(logging.getLogger("async_grpo"), "propagate", True)
        one = experience(controller, tmp_path, "held", experience_timeout_s=1.0)
        begun = time.monotonic()
        one.start()
        assert one.after_step(1) == {} == one.after_step(2)
        assert (
            time.monotonic() - begun < 5.0
            and "step 2 is not evaluated, because the evaluation of step 0 still runs" in caplog.text
        )
        assert one.after_step(3) == {}
        assert "the evaluation of step 0 has not ended: the run goes on without" in caplog.text
        assert not (tmp_path / "eval_metrics.jsonl").exists()

    def test_what_was_found_is_written_by_file_with_its_own_seconds(self, controller, tmp_path):
        ray.get(controller.let_go.remote(), timeout=20)
        one = experience(controller, tmp_path, "easy", "hard", eval_pinned=True)
        one.start()
        at_start = [json.loads(line) for line in (tmp_path / "eval_metrics.jsonl").read_text().splitlines()]
        assert [(line["step"], line["file"], line["seconds"]) for line in at_start] == [
            (0, "easy", 2.0),
            (0, "hard", 2.0),
        ]
        found = one.after_step(1)
        assert found["eval_step"] == 1 and found["eval_seconds"] == 8.0  # with those of the start
        assert found["eval_easy_avg_reward"] == 0.5 == found["eval_hard_avg_reward"]
        assert (tmp_path / "eval_samples_1_hard.jsonl").read_text() == '{"completion": "x"}\n'

    def test_training_waits_for_the_evaluation_at_the_start_although_it_waits_for_no_other(
        self, controller, tmp_path
    ):
        one = experience(controller, tmp_path, "held")
        letting_go = threading.Timer(1.0, lambda: ray.get(controller.let_go.remote(), timeout=20))
        letting_go.start()
        one.start()
        (line,) = (tmp_path / "eval_metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["step"] == 0
        letting_go.join(20)

    def test_the_seconds_of_an_evaluation_at_the_start_are_in_the_first_step(self, controller, tmp_path):
        ray.get(controller.let_go.remote(), timeout=20)
        one = experience(controller, tmp_path, "held", eval_pinned=True, eval_every=0)
        one.start()
        found = one.after_step(1)
        assert found["eval_step"] == 0 and found["eval_seconds"] == 2.0 and one.after_step(2) == {}


class HangsInEvaluation(FakeVerification):
    """A judge that answers in training alone."""

    asked = 0

    async def verify(self, sample, *, evaluation=False):
        if evaluation:
            HangsInEvaluation.asked += 1
            await asyncio.Event().wait()
        return await super().verify(sample)


def test_a_judge_that_hangs_in_an_evaluation_stalls_no_step(tmp_path):
    chain = Chain(tmp_path, config=chain_config(experience_timeout_s=10.0))
    begin = chain.link.start

    def start() -> None:
        begin()
        task = EvaluationConfig(eval_samples=4, eval_share=1.0)
        chain.evaluation = chain.link.begin(chain.controller.evaluate({"held": QUESTIONS * 5}, task))

    chain.link.start = start
    HangsInEvaluation.asked = 0
    lines = chain.train(HangsInEvaluation)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert HangsInEvaluation.asked >= 4 and not chain.evaluation.done()
    assert all(line["samples_in_batch"] == line["num_reward_ok"] for line in lines)


async def test_where_nothing_is_trained_every_engine_works_as_soon_as_it_joins(tmp_path):
    """With the weights that it started with: no sync will ever reach it."""
    controller = RunController(replace(tiny_policy.SETTINGS, trains=False), 5.0, Link, "least_loaded")

    async def ask(ordinal: int) -> int:
        prompt = Prompt(ordinal, np.array([1, 2], np.int32), {})
        return len([one async for one in controller._generation.generate(prompt, 8)])

    async def join(name: str) -> None:
        assert not await controller._workers_by_kind["generation"].register(worker(name), "handle")
        link_to(controller, name).completing.set()

    first = asyncio.create_task(ask(0))
    await asyncio.sleep(0)
    await join("g0")
    assert await first == 8
    link_to(controller, "g0").completing.clear()  # it is busy from now on
    held = asyncio.create_task(ask(1))
    await asyncio.sleep(0)
    await join("late")
    assert await asyncio.wait_for(ask(2), 5) == 8 and not held.done()
    link_to(controller, "g0").completing.set()
    assert await held == 8
