"""What rank 0 opens on a real Ray cluster, and whom it lets in."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from async_grpo.config import RunConfig
from async_grpo.errors import ConfigurationError, DeadlineExceeded
from async_grpo.modeling.load import model_fingerprint
from async_grpo.types import Settings, WorkerInfo
from async_grpo.weights.package import WeightPackage

ray = pytest.importorskip("ray")
from async_grpo.cluster import dispatch, head  # noqa: E402 - after the check that ray is there

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "sample-data" / "tiny-model"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(include_dashboard=False, log_to_driver=False, namespace="test-head", runtime_env=environment)
    yield
    ray.shutdown()


SETTINGS = Settings(
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
    seed=0,
)


def config(**changes) -> RunConfig:
    paths = {"model_name_or_path": str(MODEL), "data_path": "d", "samples_per_question": 8, "batch_size": 2}
    return RunConfig(**{**paths, "start_timeout_s": 2.0, **changes})


def worker(worker_id: str = "g0", kind: str = "generation", role: str = "", max_sequences: int = 8) -> WorkerInfo:
    return WorkerInfo(worker_id, kind, "node", os.getpid(), max_sequences, 1000, role)


@pytest.fixture
def run() -> Iterator[head.OpenRun]:
    opened = head.open_run(config(), SETTINGS)
    yield opened
    for registry in opened.registries.values():
        ray.kill(registry)


def register(run: head.OpenRun, info: WorkerInfo, rewards: str = "countdown"):
    registry = run.generation if info.kind == "generation" else run.logprob
    return ray.get(registry.register.remote(info, "handle", rewards), timeout=30)


def test_the_rewards_that_workers_name_are_the_run_s(run):
    register(run, worker("g0"))
    register(run, worker("g1"))
    assert head.await_workers(run, config(), []) == "countdown"


def test_workers_that_name_different_rewards_do_not_start_a_run(run):
    register(run, worker("g0"), "countdown")
    register(run, worker("g1"), "format")
    with pytest.raises(ConfigurationError, match="different rewards: countdown / format"):
        head.await_workers(run, config(), [])


def test_a_missing_worker_is_named_with_its_command_when_the_wait_is_over(run):
    register(run, worker("g0"))
    with pytest.raises(DeadlineExceeded, match="no reference logprob worker .python worker_dispatcher.py"):
        head.await_workers(run, config(), ["reference"])


def test_a_group_that_fits_no_worker_is_refused(run):
    register(run, worker("g0", max_sequences=7))
    with pytest.raises(ConfigurationError, match=r"a group of 8 .* takes 7 sequences"):
        head.await_workers(run, config(), [])


def test_another_model_is_refused_on_both_sides(run, tmp_path):
    for path in MODEL.iterdir():
        text = path.read_bytes()
        (tmp_path / path.name).write_bytes(text.replace(b'"hidden_size": 128', b'"hidden_size": 64'))
    with pytest.raises(ConfigurationError, match="another architecture or vocabulary") as refusal:
        dispatch.check_model(str(tmp_path), SETTINGS)
    ray.get(run.generation.refuse.remote(str(refusal.value)), timeout=30)
    with pytest.raises(ConfigurationError, match="another architecture or vocabulary"):
        head.await_workers(run, config(), [])


def test_a_model_whose_context_is_too_short_is_refused():
    with pytest.raises(ConfigurationError, match="the run needs 100000"):
        dispatch.check_model(str(MODEL), replace(SETTINGS, max_total_tokens=100_000))


def test_two_runs_of_one_name_do_not_meet(run):
    with pytest.raises(ConfigurationError, match="a run named 'default' is open on this cluster"):
        head.open_run(config(), SETTINGS)


def test_a_late_worker_gets_the_current_weights_before_it_gets_work(run):
    """Joins while weights are on their way: it waits, is handed the new package, and is active only with that."""
    package = WeightPackage(5, {}, [], None, None)
    register(run, worker("early"))
    assert list(ray.get(run.generation.begin_sync.remote(), timeout=30)) == ["early"]
    joining = run.generation.register.remote(worker("late"), "handle", "")
    assert not ray.wait([joining], timeout=0.5)[0]  # not between begin and end
    ray.get(run.generation.end_sync.remote(package, ["early"]), timeout=30)
    assert ray.get(joining, timeout=30).version == 5
    assert ray.get(run.generation.activate.remote("late", 4), timeout=30) is False  # an older one will not do
    assert ray.get(run.generation.activate.remote("late", 5), timeout=30) is True


def test_the_word_that_a_run_is_over_reaches_the_waiting_dispatchers(run):
    waiting = run.generation.closed.remote()
    head.close_run(run, "all steps are done")
    assert ray.get(waiting, timeout=30) == "all steps are done"
