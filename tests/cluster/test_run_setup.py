"""What rank 0 opens on a real Ray cluster, and whom it lets in."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from async_grpo.config.run import RunConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded
from async_grpo.modeling.load import model_fingerprint
from async_grpo.types import SharedRunSettings, WorkerInfo
from async_grpo.weights.package import SELF_TEST, WeightPackage

ray = pytest.importorskip("ray")
from async_grpo.cluster import run_setup, worker_program  # noqa: E402 - after the check that ray is there
from async_grpo.cluster.weight_sync import RayEngineControl  # noqa: E402

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "sample-data" / "tiny-model"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(
        address="local",  # never a cluster that happens to run here
        include_dashboard=False,
        log_to_driver=False,
        namespace="test-head",
        runtime_env=environment,
    )
    yield
    ray.shutdown()


SETTINGS = SharedRunSettings(
    run_name="test",
    model_fingerprint=model_fingerprint(MODEL),
    vocab_size=300,
    dtype="float32",
    temperature=1.0,
    stop_token_ids=(1,),
    max_total_tokens=64,
    max_completion_tokens=16,
    samples_per_question=8,
    transport="object_store",
    logprob_roles=("reference",),
    seed=0,
)


def config(**changes) -> RunConfig:
    paths = {"model_name_or_path": str(MODEL), "data_path": "d", "samples_per_question": 8, "batch_size": 2}
    return RunConfig(**{**paths, "start_timeout_s": 2.0, **changes})


def worker(worker_id: str = "g0", kind: str = "generation", max_sequences: int = 8) -> WorkerInfo:
    return WorkerInfo(worker_id, kind, max_sequences, 1000)


@pytest.fixture
def run() -> Iterator[run_setup.OpenRun]:
    opened = run_setup.open_run(config(), SETTINGS)
    yield opened
    for registry in opened.registries.values():
        ray.kill(registry)


def register(run: run_setup.OpenRun, info: WorkerInfo, rewards: str = "countdown"):
    registry = run.registries[info.kind]
    return ray.get(registry.register.remote(info, "handle", rewards), timeout=30)


def test_the_rewards_that_workers_name_are_the_run_s(run):
    register(run, worker("g0"))
    register(run, worker("g1"))
    register(run, worker("r0", kind="reference"))
    assert run_setup.await_workers(run, config()) == "countdown"


def test_workers_that_name_different_rewards_do_not_start_a_run(run):
    register(run, worker("g0"), "countdown")
    register(run, worker("g1"), "format")
    register(run, worker("r0", kind="reference"))
    with pytest.raises(ConfigurationError, match="different rewards: countdown / format"):
        run_setup.await_workers(run, config())


def test_a_missing_worker_is_named_with_its_command_when_the_wait_is_over(run):
    register(run, worker("g0"))
    with pytest.raises(DeadlineExceeded, match="no reference logprob worker .python worker_dispatcher.py"):
        run_setup.await_workers(run, config())


def test_a_group_that_fits_no_worker_is_refused(run):
    register(run, worker("g0", max_sequences=7))
    register(run, worker("r0", kind="reference"))
    with pytest.raises(ConfigurationError, match=r"a group of 8 .* takes 7 sequences"):
        run_setup.await_workers(run, config())


def test_another_model_is_refused_on_both_sides(run, tmp_path):
    for path in MODEL.iterdir():
        text = path.read_bytes()
        (tmp_path / path.name).write_bytes(text.replace(b'"hidden_size": 128', b'"hidden_size": 64'))
    with pytest.raises(ConfigurationError, match="another architecture or vocabulary") as refusal:
        worker_program.check_model(str(tmp_path), SETTINGS)
    ray.get(run.generation.refuse.remote(str(refusal.value)), timeout=30)
    with pytest.raises(ConfigurationError, match="another architecture or vocabulary"):
        run_setup.await_workers(run, config())


def test_a_model_whose_context_is_too_short_is_refused():
    with pytest.raises(ConfigurationError, match="the run needs 100000"):
        worker_program.check_model(str(MODEL), replace(SETTINGS, max_total_tokens=100_000))


def test_two_runs_of_one_name_do_not_meet(run):
    with pytest.raises(ConfigurationError, match="a run named 'default' is open on this cluster"):
        run_setup.open_run(config(), SETTINGS)


def package(version: int, chunks: list | None = None) -> WeightPackage:
    return WeightPackage(version, {}, ["a chunk"] if chunks is None else chunks, None, None, 1e-4)


def call(reference):
    return ray.get(reference, timeout=30)


def test_a_late_worker_must_pass_the_self_test_and_load_the_current_weights_before_it_gets_work(run):
    """It joins while weights are on their way: it waits, and is handed the self-test and the new weights."""
    registry = run.generation
    assert register(run, worker("early")) == []  # before the first sync there is nothing to load
    call(registry.keep_self_test.remote(package(SELF_TEST)))
    assert [info.worker_id for info, _ in call(registry.begin_sync.remote())] == ["early"]
    joining = registry.register.remote(worker("late"), "handle", "")
    assert not ray.wait([joining], timeout=0.5)[0]  # not between begin and end
    call(registry.end_sync.remote(package(5), ["early"]))
    assert [p.version for p in call(joining)] == [SELF_TEST, 5]
    assert [info.worker_id for info, _ in call(registry.begin_sync.remote())] == [
        "early"
    ]  # it is on its own way
    call(registry.end_sync.remote(package(6), ["early"]))
    assert call(registry.activate.remote("late", 5)) is False  # version 6 came first: it must load again
    assert [p.version for p in call(registry.current.remote())] == [6]
    assert call(registry.activate.remote("late", 6)) is True
    assert {info.worker_id for info, _ in call(registry.begin_sync.remote())} == {"early", "late"}


def test_where_weights_travel_outside_the_packages_a_late_worker_waits_for_the_next_sync(run):
    call(run.generation.end_sync.remote(package(5, chunks=[]), []))
    assert register(run, worker("late")) == []


def test_an_nccl_sync_begins_with_the_members_and_their_sizes(run):
    register(run, replace(worker("g0"), world_size=2))
    register(run, worker("g1"))
    assert RayEngineControl(run.generation, 30, lambda package: None).begin() == {"g0": 2, "g1": 1}


def test_the_word_that_a_run_is_over_reaches_the_waiting_dispatchers(run):
    register(run, worker("g0"))
    waiting = run.generation.closed.remote()
    closing = threading.Thread(target=run_setup.close_run, args=(run, "all steps are done"))
    closing.start()
    assert ray.get(waiting, timeout=30) == "all steps are done"
    assert closing.is_alive()  # it waits for the workers to sign off
    call(run.generation.deregister.remote("g0", "the run is over"))
    closing.join(10)
    assert not closing.is_alive()
