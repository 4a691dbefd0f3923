"""Warm servers for processes that tests start: engines and Ray's actors begin as forks, as those of a run do.

Importing torch, transformers and vLLM takes about ten seconds of the processor, and the tests start some fifty processes
that need them. Whole runs start servers of their own instead, as a user's runs do: a rank knows the folder of its run by
the launcher among its ancestors, and a process that a server of the tests forks does not descend from a launcher.
"""

import multiprocessing.spawn
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path

from async_grpo.launch.warm_start import preloaded_libraries, warm_pythons
from async_grpo.processes.private_folder import private_folder
from async_grpo.processes.process_tree import die_with

ROOT = Path(__file__).resolve().parents[2]
# Whoever starts a process must set these. If a variable differs that libraries read when they are imported, the server
# refuses, and the process starts as usual
VARIABLES = {
    # `tests/cluster` is there because Ray's actors import the classes of the tests by name
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers", ROOT / "tests" / "cluster"))),
    "PYTHONUNBUFFERED": "1",  # Ray sets it for its actors
    "OMP_NUM_THREADS": "1",
    # Small engines that are quiet, and do not each claim cores of their own
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class WarmServers:
    """Two files that are called instead of `python`.

    Attributes:
        torch: It starts processes with torch and transformers.
        vllm: It starts processes that also have vLLM; None where vLLM is not installed.
    """

    torch: Path
    vllm: Path | None

    @contextmanager
    def starting_engines(self) -> Iterator[None]:
        """In the block, `multiprocessing` starts processes through the server of vLLM, as in the actors of a run."""
        assert self.vllm is not None, "vLLM is not installed"
        resource_tracker.ensure_running()  # as usual, because it lives as long as this process
        with _started_by(str(self.vllm)):
            yield


def starting_as_usual() -> AbstractContextManager[None]:
    """In the block, `multiprocessing` starts Python itself, also where a fixture has a server start it."""
    return _started_by(sys.executable)


@contextmanager
def _started_by(executable: str) -> Iterator[None]:
    previous = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(executable)
    try:
        yield
    finally:
        multiprocessing.set_executable(previous)


@contextmanager
def warm_servers() -> Iterator[WarmServers]:
    """Start the servers. They import while the block runs, and end with it, and their processes with them."""
    with private_folder() as scratch:
        with_engines = find_spec("vllm") is not None
        warm = warm_pythons(scratch, eager=True, with_engines=with_engines)
        preloaded = {"LD_PRELOAD": preloaded_libraries()} if with_engines else {}
        with (scratch / "log").open("wb") as sink:
            process = subprocess.Popen(
                warm.command,
                env=os.environ | VARIABLES | preloaded,
                pass_fds=[listener.fileno() for listener in warm.listeners],
                stdout=sink,
                stderr=sink,
                start_new_session=True,
                preexec_fn=partial(die_with, os.getpid()),
            )
        for listener in warm.listeners:
            listener.close()
        try:
            yield WarmServers(warm.torch, warm.vllm)
        finally:
            process.kill()
            process.wait()
            if "starts as usual" in (said := (scratch / "log").read_text()):
                warnings.warn(f"processes were not forked from a warm server:\n{said}", stacklevel=2)
