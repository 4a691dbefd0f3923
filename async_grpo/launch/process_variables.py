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
from async_grpo.options.source_file import checkout_variables
from async_grpo.processes.device_variables import is_device_variable
from async_grpo.processes.private_folder import compile_cache

LOOPBACK = "127.0.0.1"
INHERITED = """
    PATH HOME LANG LC_ALL TZ TMPDIR USER LD_LIBRARY_PATH VIRTUAL_ENV ASYNC_GRPO_LOGS
    GLOO_SOCKET_IFNAME TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS
""".split()
INHERITED_PREFIXES = tuple("RAY_ OMP_ MKL_ HF_HUB_OFFLINE TOKENIZERS_ PYTHON".split())
# Example of the longest path of a socket inside Ray's folder. A process id has at most 7 digits
LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
MAX_SOCKET_BYTES = 107  # longest path of a socket on Linux, in bytes (see unix(7))
MIN_PORT = 20_000  # Ray's workers use the ports below this one
END_OF_PORTS = 32_768  # from this port on, Linux assigns ports to outgoing connections
# A rank with a larger model is faster with more than one thread (docs/log.md, 2026-11-22)
LARGE_MODEL_BYTES = 32 << 20
CONNECT_TIMEOUT_S = 5.0
# Device files of the drivers of NVIDIA (also in WSL) and AMD. If none exists, there is no GPU
GPU_DEVICES = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def ray_command(address: str, scratch: Path, num_gpus: int = 0) -> list[str]:
    """Return the command of a Ray head node that only this machine can reach.

    Args:
        address: `host:port` of the head node.
        scratch: Private folder that contains Ray's folder, because Ray makes its own folder accessible to all users.
        num_gpus: Number of GPUs for workers. Without this number, Ray would detect GPUs with the driver's library.
    """
    host, port = address.split(":")
    folder = ray_folder(scratch)
    python = sys.executable
    if shlex.quote(sys.prefix) != sys.prefix:
        # Ray writes the interpreter's path into a shell command without quotes. A link gives it a path without special
        # characters
        (scratch / "python").symlink_to(sys.prefix, target_is_directory=True)
        python = str(scratch / "python" / Path(python).relative_to(sys.prefix))
    return [
        python,
        "-m",
        "async_grpo.cluster.ray_head",
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        f"--node-ip-address={host}",
        f"--port={port}",
        # Ray always starts its Ray Client server, whose default port 10001 may be in use by another run
        f"--ray-client-server-port={free_port(apart_from=int(port))}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        f"--temp-dir={folder}",
        f"--num-gpus={num_gpus}",
    ]


def ray_folder(scratch: Path) -> Path:
    """Return the folder in which Ray keeps its sessions, logs and sockets."""
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


def torchrun_arguments(ranks: int, scratch: Path) -> list[str]:
    """Return the arguments with which Python starts torchrun on this machine.

    Ranks find each other through files in `scratch`.

    torchrun also needs the variables of `torchrun_environment`. Without the files, torchrun would listen on all network
    interfaces without a key: anyone who reaches it could read and change the ranks' addresses.
    """
    return [
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={scratch / 'torchrun-store'}",
        # Otherwise torchrun makes a folder in /tmp that nobody deletes
        f"--log-dir={scratch / 'torchrun-logs'}",
    ]


def torchrun_environment(scratch: Path) -> dict[str, str]:
    """Return the variables with which torchrun and the ranks use a file instead of a TCP store."""
    ranks_store = str(scratch / "ranks-store")  # the ranks read this variable in training/distributed.py
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ASYNC_GRPO_RANKS_STORE": ranks_store}


def run_environment(ray_address: str, trainer_gpus: int, ray_is_up: Path, logs: Path) -> dict[str, str]:
    """Return the environment variables of every program of a run.

    Args:
        ray_address: The Ray cluster to join. "" means a private cluster on a free port of the loopback interface.
        trainer_gpus: Number of GPUs for the trainer, which gets the first ones.
        ray_is_up: A file. The programs wait until it exists before they connect to a private cluster.
        logs: Folder into which the actors of a private cluster write their logs.
    """
    variables = {
        "RAY_ADDRESS": ray_address or f"{LOOPBACK}:{free_port()}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # more threads would compete for the cores
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    # If this library is a checkout that is not installed, the programs need its path
    variables |= checkout_variables()
    variables |= compile_cache()
    # Switch precompiled headers off. PyTorch keeps them in the folder of temporary files. This folder is new in each
    # run, so each run would spend seconds on compiling them again
    headers = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
    variables[headers] = os.environ.get(headers, "0")
    if not ray_address:
        # With the default, Ray would replace 127.0.0.1 by the machine's network address, and listen on all interfaces
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
        variables["RAY_AUTH_MODE"] = "token"
        variables["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # `cluster/ray_session.py` and `options/log_setup.py` read these two variables
        variables["ASYNC_GRPO_RAY_IS_UP"] = str(ray_is_up)
        variables["ASYNC_GRPO_LOGS"] = str(logs.absolute())
        # Ray's default niceness is 15: engines would get only the cores that the trainer leaves idle
        variables["RAY_worker_niceness"] = "0"
        # Do not let Ray start processes in advance: each actor needs its own environment variables, so it could not use
        # them
        variables["RAY_prestart_worker_first_driver"] = "0"
        variables["RAY_enable_worker_prestart"] = "0"
    if devices := gpus():
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:trainer_gpus])  # the other GPUs belong to Ray
    return {**os.environ, **variables}


def trainer_threads(model: str, ranks: int, *, updates_on_cpu: bool = False) -> dict[str, str]:
    """Return the variables that set the number of threads of a trainer rank.

    A rank that computes on the CPU gets an equal share of the cores if the model is large enough to keep the threads
    busy. All other ranks get one thread.

    Args:
        model: Hugging Face folder of the model.
        ranks: Number of ranks on this machine.
        updates_on_cpu: Whether the optimizer's step is computed on the CPU even if there are GPUs (`--cpu-offload`).
    """
    model_bytes = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    num_threads = 1
    if model_bytes > LARGE_MODEL_BYTES and (updates_on_cpu or not gpus()):
        num_cores = len(os.sched_getaffinity(0))
        num_threads = max(1, num_cores // max(1, ranks))
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def trainer_memory(share: float) -> dict[str, str]:
    """Return the variables for the memory of a trainer rank on a GPU.

    Args:
        share: Fraction of its GPU's memory that the rank may take.
    """
    if not gpus():
        return {}
    variables = {}
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Micro-batches differ in size. With this setting, a freed block of memory can be reused for a tensor of another
        # size
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if share < 1.0:
        variables["ASYNC_GRPO_GPU_SHARE"] = f"{share:.4f}"  # read in training/distributed.py
    return variables


def ray_environment(environment: Mapping[str, str], trainer_gpus: int, judge_gpus: int) -> dict[str, str]:
    """Return the environment variables of a run's Ray cluster, which all actors inherit.

    The variables contain no secrets. CUDA_VISIBLE_DEVICES leaves out the GPUs of the trainer and of the judge.

    Args:
        environment: The variables of the run's other programs (`run_environment`).
        trainer_gpus: Number of GPUs that only the trainer uses, which gets the first ones.
        judge_gpus: Number of GPUs that only the judge uses, which gets the last ones.
    """
    variables = {}
    for name, value in environment.items():
        if name in INHERITED or name.startswith(INHERITED_PREFIXES) or is_device_variable(name):
            variables[name] = value
    if devices := gpus():
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices[trainer_gpus : len(devices) - judge_gpus])
    return variables


def gpus() -> list[str]:
    """Return the ids of the GPUs that this process may use.

    Raises:
        ConfigurationError: CUDA_VISIBLE_DEVICES names a GPU twice, so that CUDA finds none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = ",".join(map(str, range(_count_gpus())))
    devices = [device.strip() for device in visible.split(",") if device.strip()]
    # CUDA ignores an invalid id and all ids after it. Slurm and containers use these two ids to hide all GPUs
    for end in ("-1", "NoDevFiles"):
        devices = devices[: devices.index(end)] if end in devices else devices
    if len({*devices}) < len(devices):
        raise ConfigurationError(
            f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice, and CUDA then finds none: name each GPU once; with "
            "--colocate, trainer and engines share it"
        )
    return devices


def _count_gpus() -> int:
    if not any(device.exists() for device in GPU_DEVICES):
        return 0
    # Import torch only here: every program of a run calls this function, but few of them need torch
    import torch

    return torch.cuda.device_count()


def free_port(apart_from: int | None = None) -> int:
    """Return a port of the loopback interface on which nothing listens.

    The port is outside of the range that Linux assigns to outgoing connections. So it stays free until the caller's
    program listens on it.

    Args:
        apart_from: A port that must not be returned.

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
    """Check that a program listens at a Ray cluster's address. Ray itself would try to connect for minutes.

    Raises:
        ConfigurationError: Nothing listens at the address.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--ray-address {address}: nothing listens there ({error})") from error
