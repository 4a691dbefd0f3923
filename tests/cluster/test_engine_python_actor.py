"""The actor of a worker with `--engine-python`: which Python starts it, with which variables."""

from typing import Any
from unittest.mock import Mock

import pytest
from engine_environments import stand_in

from async_grpo.cluster import worker_program
from async_grpo.config.run import WorkerConfig
from async_grpo.data import TINY_MODEL
from async_grpo.errors import ConfigurationError
from async_grpo.options.source_file import PACKAGE_ROOT


@pytest.fixture
def asked(monkeypatch) -> dict[str, Any]:
    """The options of the actor that is made, in a run whose processes are forked."""
    options: dict[str, Any] = {}
    monkeypatch.setenv("ASYNC_GRPO_WARM_VLLM", "/run/warm-vllm")
    monkeypatch.setenv("ASYNC_GRPO_WARM_TORCH", "/run/warm-torch")
    monkeypatch.setattr(worker_program, "ray", Mock(nodes=list))
    monkeypatch.setattr(worker_program, "on_this_node", dict)
    monkeypatch.setattr(worker_program, "zero_cpu_actor", lambda _, **given: options.update(given) or Mock())
    return options


@pytest.mark.parametrize("node", ["here", "any"])
def test_the_engine_is_started_by_the_other_python(asked, node):
    config = WorkerConfig(
        mode="generation", model_path=str(TINY_MODEL), engine_python="/opt/my engines/bin/python", node=node
    )
    worker_program._make_actor(config)
    environment = asked["runtime_env"]
    assert environment["py_executable"] == "'/opt/my engines/bin/python'"
    assert environment["env_vars"]["PATH"] == "/opt/my engines/bin:${PATH}"
    assert environment["env_vars"]["PYTHONPATH"].split(":")[0] == str(PACKAGE_ROOT.resolve())
    assert environment["env_vars"]["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


@pytest.mark.parametrize(
    ("mode", "engine", "python", "started_by"),
    [
        ("logprob", "vllm", "/opt/engines/bin/python", "/run/warm-torch"),
        ("logprob", "vllm", "", "/run/warm-torch"),
        ("generation", "vllm", "", "/run/warm-vllm"),
        ("generation", "engine.py:OnVllm", "", "/run/warm-vllm"),
        ("generation", "fake", "", "/run/warm-torch"),
    ],
)
def test_all_others_stay_in_the_run_s_environment(asked, mode, engine, python, started_by):
    given = {"model_path": str(TINY_MODEL), "engine": engine, "engine_python": python}
    worker_program._make_actor(WorkerConfig(mode=mode, **given))
    assert asked["runtime_env"]["py_executable"] == started_by
    assert "PATH" not in asked["runtime_env"]["env_vars"]


def test_a_worker_refuses_a_python_that_does_not_fit_before_it_joins(tmp_path, monkeypatch):
    def join(*_: object) -> None:
        raise AssertionError("it joined")

    monkeypatch.setattr(worker_program, "connect", join)
    given = {"model_path": str(TINY_MODEL), "engine_python": str(stand_in(tmp_path, ray="2.1.0"))}
    with pytest.raises(ConfigurationError, match=r"has ray 2\.1\.0"):
        worker_program.dispatch(WorkerConfig(mode="generation", **given))
    with pytest.raises(AssertionError, match="it joined"):
        worker_program.dispatch(WorkerConfig(mode="logprob", **given))
