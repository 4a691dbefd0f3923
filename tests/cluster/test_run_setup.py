"""The run's controller as an actor of a real Ray cluster: its name, its workers' deaths, and its own."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_controller import MODEL, SETTINGS, worker

from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded, WorkerLost

ray = pytest.importorskip("ray")
from async_grpo.cluster import trainer_rank, worker_program  # noqa: E402 - after the check that ray is there
from async_grpo.cluster.channel import ChannelServer  # noqa: E402
from async_grpo.cluster.ray_session import answer, zero_cpu_actor  # noqa: E402
from async_grpo.cluster.weight_sync import RayEngines  # noqa: E402

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


@pytest.fixture
def handle() -> Iterator[Any]:
    actor = zero_cpu_actor(Worker).remote()
    yield actor
    ray.kill(actor)


def call(reference: Any) -> Any:
    return ray.get(reference, timeout=30)


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
    assert RayEngines(run, 30).begin() == {"g0": 1, "g1": 1}  # whom an NCCL sync begins with, and their sizes


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
    with pytest.raises(worker_program._RunIsOver, match="all steps are done"):  # one that is still loading
        worker_program._unless_closed(handle.exchange.remote("x", [], True), run.closed.remote(), 30)


def test_the_controller_s_death_is_named(run, handle):
    closed = run.closed.remote()
    ray.kill(run)
    with pytest.raises(WorkerLost, match="the run's controller died"):
        answer(run.settings.remote())
    with pytest.raises(WorkerLost, match="the trainer is gone: the run's controller died"):
        worker_program._unless_closed(handle.exchange.remote("x", [], True), closed, 30)
