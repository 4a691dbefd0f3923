"""Coroutine tests run in an event loop of their own, with a deadline; and what tests of several files share."""

import asyncio
import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

TEST_DEADLINE_S = 60
collect_ignore = ["long"]  # programs, which nothing but `python -m tests.long.NAME` runs
LONGEST_FIRST = (
    "tests/real/test_quickstart_real",
    "tests/real/test_resume_real",
    "tests/real/test_environment_real",
    "tests/real",
    "tests/resume",
    "tests/cluster",
)

# By default an example that takes more than 200 ms fails its test, which depends on the speed of the machine
hypothesis.settings.register_profile("without_deadline", deadline=None)
hypothesis.settings.load_profile("without_deadline")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: several processes share the files, and one would end alone with a long one.

    The order of the files on the command line does not decide: pytest drops those that lie in other folders there.
    """

    def place(item: pytest.Item) -> int:
        places = (number for number, path in enumerate(LONGEST_FIRST) if item.nodeid.startswith(path))
        return next(places, len(LONGEST_FIRST))

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), TEST_DEADLINE_S))
    return True


@pytest.fixture(scope="session")
def warm() -> Iterator[Any]:
    """Processes that start as forks of one that has imported torch and vLLM; see `warm_servers`."""
    from warm_servers import warm_servers

    with warm_servers() as servers:
        yield servers


@pytest.fixture(scope="module")
def ray_cluster(warm) -> Iterator[None]:
    """One Ray for the tests of a file that want it, whose actors have imported torch before they start."""
    ray = pytest.importorskip("ray")
    from warm_servers import VARIABLES

    with pytest.MonkeyPatch.context() as patch:
        # While the cluster runs: a run's controller gets those of this process
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        # vLLM sets some where a test has imported it, and the server, which has not, would refuse the actors
        for name in [name for name in os.environ if name.startswith("TORCHINDUCTOR_")]:
            patch.delenv(name)
        ray.init(
            address="local",  # never a cluster that happens to run here
            include_dashboard=False,
            log_to_driver=False,
            namespace="test-cluster",
            runtime_env={"py_executable": str(warm.torch)},
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of a small real model."""
    from real_model import real_model

    return real_model()


@pytest.fixture
def ranks() -> Iterator[Any]:
    """This process as a world of one."""
    from async_grpo.training.distributed import distributed_run

    with distributed_run("cpu") as ranks:
        yield ranks
