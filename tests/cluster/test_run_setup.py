"""The run's controller as an actor of a real Ray cluster: its name, its workers' deaths, and its own."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from controller_links import MODEL, SETTINGS, worker

from async_grpo.config.run import RunConfig, WorkerConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.experience.config import NO_FACTS
from async_grpo.experience.dataset import Question
from async_grpo.messages import WorkersJoined
from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.testing import FakeVerification
from async_grpo.training.sharding import canary_logprobs
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.publisher import Publisher

ray = pytest.importorskip("ray")
from async_grpo.cluster import trainer_rank, weight_sync, worker_actors, worker_program  # noqa: E402 - after the check that ray is there
from async_grpo.cluster.channel import ChannelServer  # noqa: E402
from async_grpo.cluster.ray_session import answer, zero_cpu_actor  # noqa: E402
from async_grpo.cluster.weight_sync import RayEngines, check_object_store  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("ray_cluster")]


def config(**changes: Any) -> RunConfig:
    paths = {"model_name_or_path": str(MODEL), "data_path": "d", "samples_per_question": 8, "batch_size": 2}
    return RunConfig(**{**paths, "start_timeout_s": 2.0, **changes})


@pytest.fixture
def run() -> Iterator[Any]:
    controller = trainer_rank.open_run(config(), SETTINGS)
    yield controller
    ray.kill(controller)


class Worker(ChannelServer):
    """A worker that has loaded, and waits for work."""

    def __init__(self) -> None:
        self.serve({})

    async def pid(self) -> int:
        return os.getpid()

    async def transfer(self, method: str, *args: Any) -> Any:
        """A step of a sync: the second engine of the group dies over a broadcast, the others wait for it for ever."""
        if method == "receive_weights":
            if self.place == 2:
                os._exit(1)
            await asyncio.sleep(3600)
        if method == "init_weight_transfer":
            self.place = args[0]["rank_offset"]
        return method


@pytest.fixture
def handle() -> Iterator[Any]:
    actor = zero_cpu_actor(Worker).remote()
    call(actor.pid.remote())  # it is up: a worker registers only then
    yield actor
    ray.kill(actor)


def call(reference: Any) -> Any:
    return ray.get(reference, timeout=60)  # an actor's first call waits for its imports


def register(run: Any, handle: Any, *ids: str, kind: str = "generation", rewards: str = "") -> None:
    for worker_id in ids:
        call(run.register.remote(worker(worker_id, kind=kind, rewards=rewards), handle))


def test_a_missing_worker_is_named_and_so_is_a_second_run_and_the_rewards_are_those_that_workers_name(
    run, handle
):
    register(run, handle, "g0", "g1", rewards="countdown")
    with pytest.raises(DeadlineExceeded, match="no reference worker .python worker_dispatcher.py"):
        trainer_rank.await_workers(run, config(start_timeout_s=0.5))
    register(run, handle, "r0", kind="reference")
    assert trainer_rank.await_workers(run, config()) == "countdown"
    with pytest.raises(ConfigurationError, match="a run named 'default' is open on this cluster"):
        trainer_rank.open_run(config(), SETTINGS)
    (engines := RayEngines(run, 30)).begin(for_late=False)
    assert engines.members == {
        "g0": 1,
        "g1": 1,
    }  # whom an NCCL sync begins with, and their sizes


def test_a_worker_that_dies_leaves_although_nothing_was_asked_of_it(run, handle):
    def members() -> list[str]:
        return [info.worker_id for info, _ in call(run.begin_sync.remote())]

    register(run, handle, "g0")
    assert members() == ["g0"]
    os.kill(call(handle.pid.remote()), 9)
    give_up = time.monotonic() + 20
    while members() and time.monotonic() < give_up:
        time.sleep(0.1)
    assert members() == []


def test_steps_of_a_sync_name_who_was_lost_and_do_not_wait_for_those_who_wait_for_it(run, monkeypatch):
    monkeypatch.setattr(weight_sync, "OTHERS_S", 1.0)
    actors = [zero_cpu_actor(Worker).remote() for _ in range(3)]
    for actor in actors:
        call(actor.pid.remote())
    for name, actor in zip("abc", actors, strict=True):
        call(run.register.remote(worker(name), actor))
    ray.kill(actors[2])
    engines = RayEngines(run, 30)
    engines.begin(for_late=False)
    assert engines.each("pause", 1) == {"a": "pause", "b": "pause"}
    assert engines.members == {"a": 1, "b": 1}  # c is fenced
    engines.together("init_weight_transfer", {"rank_offset": 1})
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match="a, b: lost in an NCCL weight sync, by receive_weights"):
        engines.together("receive_weights", {})
    assert time.monotonic() - begun < 20 and engines.members == {}
    assert call(run.begin_sync.remote()) == []


def test_an_object_store_too_small_for_the_weights_is_refused_with_the_way_out(run):
    check_object_store(1 << 20)
    with pytest.raises(
        ConfigurationError, match=r"has \d.\d\d GB, weights on their way need 1300.00: .* --object-store"
    ):
        check_object_store(10**12)


def test_a_worker_that_joins_late_passes_the_self_test_with_the_weights_that_are_live(run):
    settings = replace(SETTINGS, vocab_size=266)

    def join(name: str) -> Any:
        actor = zero_cpu_actor(worker_actors.GenerationActor).remote()
        call(
            actor.start.remote(
                WorkerConfig(mode="generation", model_path=str(MODEL), engine="fake"), settings
            )
        )
        call(run.register.remote(worker(name), actor))
        return actor

    actors = [join("early")]
    policy = PolicyModel(load_causal_lm(MODEL, "float32"))
    engines, canary = RayEngines(run, 30), Canary([Canary.text(266, n) for n in (8, 40)], canary_logprobs)
    publisher = Publisher(engines, named_weights, canary, torch.float32, 0, WeightConfig())
    questions = [Question(np.array([5, 6], np.int32), {"input": "q", "answer": "x"})]
    call(run.start_batcher.remote(config(), NO_FACTS, 1, questions, FakeVerification))
    assert publisher.publish(policy, 0, self_test=True)()["canary_error"] < 1e-5
    actors.append(join("late"))
    assert isinstance(call(run.next_message.remote(0)), WorkersJoined)
    assert publisher.publish(policy, 0, self_test=True)()["canary_error"] < 1e-5
    assert [info.worker_id for info, _ in call(run.begin_sync.remote())] == ["early", "late"]
    for actor in actors:
        ray.kill(actor)


def test_the_word_that_a_run_is_over_reaches_the_waiting_dispatchers(run, handle):
    register(run, handle, "g0")
    waiting = run.closed.remote()
    closing = threading.Thread(target=trainer_rank.close_run, args=(run, "all steps are done"))
    closing.start()
    assert call(waiting) == "all steps are done"
    assert closing.is_alive()  # it waits for the workers to sign off
    call(run.deregister.remote("generation", "g0", "the run is over"))
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(worker_program._Ended, match="all steps are done"):  # one that is still loading
        worker_program.RunHandle(run, "generation").unless_closed(handle.exchange.remote("x", [], True), 30)


def test_the_controller_s_death_is_named(run, handle):
    told = worker_program.RunHandle(run, "generation")
    ray.kill(run)
    with pytest.raises(WorkerLost, match="the run's controller died"):
        for _ in range(300):  # the order takes its way
            answer(run.settings.remote())
            time.sleep(0.1)
    with pytest.raises(WorkerLost, match="the trainer is gone: the controller died"):
        told.unless_closed(handle.exchange.remote("x", [], True), 30)


def test_a_worker_with_another_model_is_refused_by_its_actor_and_the_trainer_hears_of_it(run):
    told = worker_program.Worker(WorkerConfig(mode="generation", engine="fake", model_path=str(MODEL)))
    opened = worker_program.RunHandle(run, "generation")
    opened.settings = replace(SETTINGS, model_fingerprint="of another model")
    refusal = "has another architecture or vocabulary than the model"
    with pytest.raises(ConfigurationError, match=f"^--model_path .* {refusal}"):
        worker_program._be_member(opened, told)
    with pytest.raises(ConfigurationError, match=refusal):
        trainer_rank.await_workers(run, config())
    told.end()
