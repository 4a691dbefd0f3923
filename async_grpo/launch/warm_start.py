"""Start the warm servers of a run on this machine, and write the files that are called instead of `python`.

See `warm_server`.
"""

import json
import os
import socket
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from async_grpo.processes.warm_server import Stage, listen, write_executable

# Modules that all forked processes need. Programs are not among them, because Python warns if a program's module was
# already imported. Modules that import Ray are not either (see `warm_server`)
SHARED_MODULES = """
    torch torch.distributed.tensor torch.distributed.fsdp transformers async_grpo.modeling.policy
""".split()
# Modules that trainer ranks, controller, workers and logprob workers need in addition to SHARED_MODULES
TORCH_MODULES = """
    torch.distributed.elastic.multiprocessing torch.distributed.launcher.api torch.optim.adamw
    async_grpo.cluster.make_trainer async_grpo.inference.logprob_worker async_grpo.config.preflight
    async_grpo.launch.plan
""".split()
# Modules that generation workers and engines need in addition to SHARED_MODULES
VLLM_MODULES = """
    vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.worker.cpu_worker
    async_grpo.inference.generation_worker async_grpo.inference.vllm_edges.worker_extension
""".split()


@dataclass(frozen=True)
class WarmPythons:
    """The files that start processes with imported libraries, and the command that starts the warm servers.

    Attributes:
        torch: Starts processes with torch and transformers.
        vllm: Starts processes that also have vLLM; None if engines run in another environment.
        command: The command of the servers.
        listeners: Sockets that the servers inherit.
    """

    torch: Path
    vllm: Path | None
    command: list[str]
    listeners: list[socket.socket]

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell the run's programs where the files are."""
        variables = {
            # torchrun reads this variable to start the ranks
            "PYTHON_EXEC": str(self.torch),
            # `cluster/ray_session.py` reads this variable
            "ASYNC_GRPO_WARM_TORCH": str(self.torch),
        }
        if self.vllm is not None:
            variables["ASYNC_GRPO_WARM_VLLM"] = str(self.vllm)
        return variables


def preloaded_libraries() -> str:
    """Return the value of LD_PRELOAD that vLLM would set for an engine on the CPU: OpenMP and an allocator."""
    torch_folder = _folder_of("torch")
    vllm_folder = _folder_of("vllm")
    libraries = [os.environ.get("LD_PRELOAD", "")]
    for folder, pattern in (
        (vllm_folder / "libs", "libtcmalloc_minimal*.so*"),
        (torch_folder.parent / "torch.libs", "libgomp*.so*"),
        (torch_folder / "lib", "libgomp*.so*"),
    ):
        libraries += map(str, sorted(folder.glob(pattern))[:1])
    return ":".join(filter(None, libraries))


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent


def warm_pythons(scratch: Path, eager: bool, with_engines: bool) -> WarmPythons:
    """Write the files that are called instead of `python` into a private folder.

    Args:
        scratch: The folder.
        eager: Whether engines compile nothing.
        with_engines: Whether engines are forked, too. If not, vLLM need not be installed here.
    """
    stages = []
    listeners = []
    # For each stage, by name: the modules to import before the next stage is forked, and the modules to import after
    # that
    modules_of_stages = {"torch": (SHARED_MODULES, TORCH_MODULES)}
    if with_engines:
        modules_of_stages["vllm"] = (VLLM_MODULES, [])
    for name, (modules, own_modules) in modules_of_stages.items():
        socket_path = scratch / f"warm-{name}.socket"
        executable = write_executable(scratch / f"warm-{name}", socket_path)
        # vLLM sets these variables before it starts an engine. They may differ if nothing is compiled, because nothing
        # reads them
        ignored = ["TORCHINDUCTOR_"] if eager and name == "vllm" else []
        listener = listen(socket_path)
        listeners.append(listener)
        stages.append(Stage(listener.fileno(), executable, modules, own_modules, ignored))
    arguments = json.dumps([stage.as_json() for stage in stages])
    command = [sys.executable, "-m", "async_grpo.processes.warm_server", arguments]
    vllm = stages[1].executable if with_engines else None
    return WarmPythons(stages[0].executable, vllm, command, listeners)
