"""One fixture of all tests of training: this process as a world of one."""

import pytest

from async_grpo.training.distributed import distributed_run


@pytest.fixture
def ranks():
    with distributed_run("cpu") as ranks:
        yield ranks
