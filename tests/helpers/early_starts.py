"""A run of which nothing is started early, so that its inputs are checked in the process of the test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from async_grpo.launch.early_start import EarlyStart
from async_grpo.launch.local_config import LocalConfig
from async_grpo.processes.supervisor import Supervisor


@contextmanager
def nothing_early(config: LocalConfig) -> Iterator[EarlyStart]:
    """Take the place of `early_start`."""
    unused = Supervisor.__new__(Supervisor)
    yield EarlyStart(Path(), unused, {}, None, Path(), None)
