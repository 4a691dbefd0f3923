"""Commands and environment variables of a run's programs on this machine: Ray, workers and torchrun."""

import os
import random
import secrets
import shlex
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from async_grpo.errors import ConfigurationError
from async_grpo.processes.private_folder import compile_cache

LOOPBACK = "127.0.0.1"
PACKAGE_PARENT = Path(__file__).resolve().parents[2]
INHERITED = """
    PATH HOME LANG LC_ALL TZ TMPDIR USER LD_LIBRARY_PATH VIRTUAL_ENV ASYNC_GRPO_LOGS
    GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS
""".split()
INHERITED_PREFIXES = tuple("RAY_ OMP_ MKL_ HF_HUB_OFFLINE TOKENIZERS_ VLLM_CPU_ VLLM_LOGGING_ PYTHON".split())
# The longest path of a socket below Ray's folder. A process id has at most 7 digits
LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
MAX_SOCKET_BYTES = 107  # unix(7): `sun_path` without its last byte
MIN_PORT = 20_000  # Ray's workers use ports below
END_OF_PORTS = 32_768  # Linux assigns ports from here on to outgoing connections
LARGE_MODEL_BYTES = (
    32 << 20
)  # from this size on, more than one thread speeds up a rank (docs/log.md, 2026-11-22)
CONNECT_TIMEOUT_S = 5.0


def ray_command(address: str, scratch: Path) -> list[str]:
    """Return the command of a Ray head node that only this machine can reach.

    Args:
        address: `host:port` of the head node.
        scratch: Private folder. Ray's own folder lies inside it, because Ray makes its folder accessible to all users.
    """
    host, port = address.split(":")
    folder = ray_folder(scratch)
    python = sys.executable
    if shlex.quote(sys.prefix) != sys.prefix:
        # Ray writes the interpreter's path into a shell's command line without quoting it
        (scratch / "python").symlink_to(sys.prefix, target_is_directory=True)
        python = str(scratch / "python" / Path(python).relative_to(sys.prefix))
    return [
        python,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        f"--node-ip-address={host}",
        f"--port={port}",
        # The server of Ray Client cannot be turned off, and another run may use its default port 10001
        f"--ray-client-server-port={free_port(apart_from=int(port))}",
        "--include-dashboard=false",
        "--no-monitor",
        f"--temp-dir={folder}",
    ]


def ray_folder(scratch: Path) -> Path:
    """Return the folder of Ray's sessions."""
    return scratch / "ray"


def check_socket_names(scratch: Path) -> None:
    """Check that the paths of Ray's sockets are not longer than the kernel allows.

    Raises:
        ConfigurationError: A path would be too long.
    """
    length = len(os.fsencode(ray_folder(scratch) / LONGEST_SOCKET))
    if length > MAX_SOCKET_BYTES:
        raise ConfigurationError(
            f"Ray's sockets in {scratch} would have names of {length} bytes, {MAX_SOCKET_BYTES} are possible: "
            "set TMPDIR to a folder with a shorter name, such as /tmp"
        )


def torchrun_command(ranks: int, scratch: Path) -> list[str]:
    """Return torchrun's command for ranks of this machine, which find each other by files in `scratch`.

    The program also needs the variables of `torchrun_environment`. Files are used because with an address torchrun
    would listen on all interfaces, and everybody who reaches its store could read and change the ranks' addresses
    without a key.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={scratch / 'torchrun-store'}",
        f"--log-dir={scratch / 'torchrun-logs'}",  # the default is a folder in /tmp that nobody deletes
    ]


def torchrun_environment(scratch: Path) -> dict[str, str]:
    """Return the variables with which torchrun opens no TCP store and the ranks use a file instead."""
    ranks_store = str(scratch / "ranks-store")  # see training/distributed.py
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ASYNC_GRPO_RANKS_STORE": ranks_store}


def run_environment(ray_address: str, trainer_gpus: int, ray_is_up: Path, logs: Path) -> dict[str, str]:
    """Return the environment variables of every program of a run.

    Args:
        ray_address: The Ray cluster to join. "" stands for a private cluster on a free port of the loopback interface.
        trainer_gpus: Number of GPUs for the trainer, which gets the first ones.
        ray_is_up: A file. The programs wait until it exists before they connect to a private cluster.
        logs: Folder into which the actors of a private cluster write their logs.
    """
    variables = {
        "RAY_ADDRESS": ray_address or f"{LOOPBACK}:{free_port()}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # more would compete for the cores
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if (PACKAGE_PARENT / "pyproject.toml").exists():
        # The package runs from a checkout, which need not be installed
        paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    variables |= compile_cache()
    # PyTorch keeps compiled headers in the folder of temporary files, which belongs to the run: each run would compile
    # them again, which takes seconds
    headers = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
    variables[headers] = os.environ.get(headers, "0")
    if not ray_address:
        # Ray would otherwise use the network's address instead of 127.0.0.1, and listen on all interfaces
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
        variables["RAY_AUTH_MODE"] = "token"
        variables["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # `cluster/ray_session.py` reads these two
        variables["ASYNC_GRPO_RAY_IS_UP"] = str(ray_is_up)
        variables["ASYNC_GRPO_LOGS"] = str(logs.absolute())
        # With Ray's default niceness of 15, engines would only get the cores that the trainer leaves idle
        variables["RAY_worker_niceness"] = "0"
        # Every actor has its own environment variables, so a worker that Ray starts in advance could never be used
        variables["RAY_prestart_worker_first_driver"] = "0"
        variables["RAY_enable_worker_prestart"] = "0"
    if devices := gpus():
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:trainer_gpus])  # Ray gets the others
    return {**os.environ, **variables}


def trainer_threads(model: str, ranks: int) -> dict[str, str]:
    """Return the variables that set the number of threads of a trainer rank.

    Without GPUs, a rank gets its share of the cores if the model is large enough to keep the threads busy, and one
    thread otherwise.

    Args:
        model: Hugging Face folder of the model.
        ranks: Number of ranks on this machine.
    """
    model_bytes = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    num_threads = 1
    if model_bytes > LARGE_MODEL_BYTES and not gpus():
        num_cores = len(os.sched_getaffinity(0))
        num_threads = max(1, num_cores // max(1, ranks))
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def ray_environment(environment: Mapping[str, str], trainer_gpus: int, judge_gpus: int) -> dict[str, str]:
    """Return the variables of a run's Ray cluster, which all actors inherit.

    They contain no secrets, and hide the GPUs of the trainer and of the judge.

    Args:
        environment: The variables of the run's other programs (`run_environment`).
        trainer_gpus: Number of GPUs that belong to the trainer, the first ones.
        judge_gpus: Number of GPUs that only the judge uses, the last ones.
    """
    names = [name for name in environment if name in INHERITED or name.startswith(INHERITED_PREFIXES)]
    variables = {name: environment[name] for name in names}
    if devices := gpus():
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices[trainer_gpus : len(devices) - judge_gpus])
    return variables


def gpus() -> list[str]:
    """Return the ids of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        # Every program of a run reads the options of `async-grpo run`, and few of them need torch otherwise
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    return [device.strip() for device in visible.split(",") if device.strip()]


def free_port(apart_from: int | None = None) -> int:
    """Return a port of the loopback interface on which nothing listens.

    Linux does not assign the port to an outgoing connection, so it stays free until the caller's program listens on it.

    Args:
        apart_from: A port that is not returned.

    Raises:
        ConfigurationError: No free port was found.
    """
    for port in random.Random().sample(range(MIN_PORT, END_OF_PORTS), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            if port != apart_from:
                return port
    raise ConfigurationError("a hundred ports of 127.0.0.1 between 20000 and 32767 are all taken")


def check_reachable(address: str) -> None:
    """Check that something listens at a Ray cluster's address. Ray itself would try to connect for minutes.

    Raises:
        ConfigurationError: Nothing listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--ray-address {address}: nothing listens there ({error})") from error
