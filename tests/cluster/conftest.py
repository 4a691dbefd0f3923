"""One Ray for the tests of this folder that want it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    here = Path(__file__).parent  # workers unpickle the actor classes of these tests by name
    paths = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    ray.init(
        address="local",  # never a cluster that happens to run here
        include_dashboard=False,
        log_to_driver=False,
        namespace="test-cluster",
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()
