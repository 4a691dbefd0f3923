"""What the programs of a run on this machine are started with: ports, variables, devices, an interpreter for Ray."""

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
# What Ray appends to its folder for the longest of its sockets; the process id has 7 digits at most
LONGEST_SOCKET = "session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
MAX_SOCKET_BYTES = 107  # unix(7): `sun_path` without its last byte


def ray_command(address: str, scratch: Path) -> list[str]:
    """Return the command of a head node that only this machine can reach.

    Its folder lies inside `scratch`, because Ray opens the one that it is given to all users.
    """
    host, port = address.split(":")
    folder = ray_folder(scratch)
    python = sys.executable
    if shlex.quote(sys.prefix) != sys.prefix:  # Ray writes it into a shell's command line as it is
        (scratch / "python").symlink_to(sys.prefix, target_is_directory=True)
        python = str(scratch / "python" / Path(python).relative_to(sys.prefix))
    return [
        *[python, "-m", "ray.scripts.scripts", "start", "--head", "--block"],
        *["--disable-usage-stats", f"--node-ip-address={host}", f"--port={port}"],
        # The server of Ray Client cannot be left out; its own port, 10001, may be another run's
        f"--ray-client-server-port={free_port(apart_from=int(port))}",
        *["--include-dashboard=false", "--no-monitor", f"--temp-dir={folder}"],
    ]


def ray_folder(scratch: Path) -> Path:
    """Return the folder of Ray's sessions."""
    return scratch / "ray"


def check_socket_names(scratch: Path) -> None:
    """Raise ConfigurationError if the names of Ray's sockets would be longer than the kernel allows."""
    length = len(os.fsencode(ray_folder(scratch) / LONGEST_SOCKET))
    if length > MAX_SOCKET_BYTES:
        raise ConfigurationError(
            f"Ray's sockets in {scratch} would have names of {length} bytes, {MAX_SOCKET_BYTES} are possible: "
            "set TMPDIR to a folder with a shorter name, such as /tmp"
        )


def torchrun_command(ranks: int, scratch: Path) -> list[str]:
    """Return torchrun's command for ranks of this machine that find each other by files in `scratch`.

    With an address torchrun would listen on all interfaces: whoever reaches its store can read and change the
    addresses of the ranks, without a key. Needs the variables of `torchrun_environment`.
    """
    return [
        *[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"],
        *["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"],
        f"--rdzv-endpoint={scratch / 'torchrun-store'}",
        f"--log-dir={scratch / 'torchrun-logs'}",  # else a folder in /tmp that stays
    ]


def torchrun_environment(scratch: Path) -> dict[str, str]:
    """Return the variables by which torchrun opens no store of its own, and the ranks use a file."""
    ranks_store = str(scratch / "ranks-store")  # see training/distributed.py
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "ASYNC_GRPO_RANKS_STORE": ranks_store}


def run_environment(ray_address: str, trainer_gpus: int, ray_is_up: Path, logs: Path) -> dict[str, str]:
    """Return the variables of every program of a run.

    Without an address, they name a private cluster on the loopback interface. Programs wait for it: it is up when the file
    `ray_is_up` exists. Its actors write into the folder `logs`.
    """
    private = {
        "RAY_ADDRESS": ray_address or f"{LOOPBACK}:{free_port()}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # more would fight over the cores
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if (PACKAGE_PARENT / "pyproject.toml").exists():  # a checkout need not be installed
        paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
        private["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    private |= compile_cache()
    # Torch keeps them in the folder of temporary files, which is a run's own: each run would compile them anew, for seconds
    headers = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
    private |= {headers: os.environ.get(headers, "0")}
    if not ray_address:
        # Without the first, Ray takes the network's address instead of 127.0.0.1, and listens on all interfaces
        private |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        private |= {"NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo")}
        private |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # See cluster/ray_session.py
        private |= {"ASYNC_GRPO_RAY_IS_UP": str(ray_is_up), "ASYNC_GRPO_LOGS": str(logs.absolute())}
        # With Ray's own niceness of 15 engines get what the trainer leaves of the cores
        private |= {"RAY_worker_niceness": "0"}
        # Every actor here has variables of its own: a worker started before it is known could never be used
        private |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
    if devices := gpus():
        private["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:trainer_gpus])  # Ray gets the others
    return {**os.environ, **private}


def trainer_threads(model: str, ranks: int) -> dict[str, str]:
    """Variables: without GPUs a rank's share of the cores, if the weights keep threads busy (docs/log.md, 2026-11-22)."""
    large = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) > 32 << 20
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, ranks)) if large and not gpus() else 1
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)), "OMP_WAIT_POLICY": "PASSIVE"}


def ray_environment(environment: Mapping[str, str], trainer_gpus: int, judge_gpus: int) -> dict[str, str]:
    """Ray's part of it, which all actors inherit: no secrets, and none of the trainer's or the judge's GPUs."""
    names = [name for name in environment if name in INHERITED or name.startswith(INHERITED_PREFIXES)]
    kept = {name: environment[name] for name in names}
    if devices := gpus():
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(devices[trainer_gpus : len(devices) - judge_gpus])
    return kept


def gpus() -> list[str]:
    """Ids of the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch  # not above: every program of a run reads the options of `async-grpo run`, few need torch for it

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    return [device.strip() for device in visible.split(",") if device.strip()]


def free_port(apart_from: int | None = None) -> int:
    """Return a port of the loopback interface that nothing listens on now, and that no outgoing connection will be given.

    Linux gives those from 32768 up: one of them, asked for now, may be taken before the program it is for listens.
    """
    for port in random.Random().sample(range(20_000, 32_768), 100):  # Ray's workers have those below 20,000
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            if port != apart_from:
                return port
    raise ConfigurationError("a hundred ports of 127.0.0.1 between 20000 and 32767 are all taken")


def check_reachable(address: str) -> None:
    """Raise ConfigurationError if nothing listens at the cluster's address: Ray would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--ray-address {address}: nothing listens there ({error})") from error
