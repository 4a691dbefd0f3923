"""The command line and the environment of one vLLM server. Nothing of vLLM is imported for it."""

import ipaddress
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.rewards.judges.remote_judge import require

FORWARDED = "PATH HOME LANG LC_ALL TZ TMPDIR USER LD_LIBRARY_PATH VIRTUAL_ENV PYTHONPATH CC CXX".split()
FORWARDED_PREFIXES = tuple("OMP_ MKL_ VLLM_ CUDA_ NVIDIA_ NCCL_ HIP_ FLASHINFER_ TRITON_ XDG_".split())
SECRET = "VLLM_API_KEY"  # given only to servers that are to ask for it
ON_THE_CPU = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
OURS = "model host port served-model-name runner enable-sleep-mode api-key".split()  # other settings decide


def command(
    model: str,
    host: str,
    port: int,
    served_name: str,
    runner: str,
    sleep_mode: bool,
    options: Mapping[str, Any],
) -> list[str]:
    """vLLM's server as a command; its own command-line program does not start with the build for the CPU.

    >>> command("m", "127.0.0.1", 8000, "judge", "auto", False, {"max-model-len": 512, "enforce_eager": True})[-3:]
    ['--runner=auto', '--max-model-len=512', '--enforce-eager']
    """
    given = {name.replace("_", "-"): value for name, value in options.items()}
    taken = sorted(set(OURS) & set(given))
    require(not taken, f"options must not hold {', '.join(taken)}: other settings of the server decide")
    fixed = [f"--model={model}", f"--host={host}", f"--port={port}", f"--served-model-name={served_name}"]
    chosen = ["--enable-sleep-mode"] * sleep_mode + [_argument(name, value) for name, value in given.items()]
    start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return [*start, *fixed, f"--runner={runner}", *chosen]


def _argument(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name}"
    return f"--{name}={json.dumps(value) if isinstance(value, dict | list) else value}"


def environment(device: str | None, api_key: str | None) -> dict[str, str]:
    """The variables of one server: the allow-listed ones of this process, and what it needs."""
    ours = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    if on_the_cpu():
        ours |= {name: os.environ.get(name, value) for name, value in ON_THE_CPU.items()}
    if device is not None:
        ours["CUDA_VISIBLE_DEVICES"] = device
    if api_key:
        ours[SECRET] = api_key  # not on the command line, where everybody can read it
    return forwarded() | ours


def forwarded() -> dict[str, str]:
    """The allow-listed variables of this process: a server has no need of its secrets."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name in FORWARDED or name.startswith(FORWARDED_PREFIXES)) and name != SECRET
    }


def on_the_cpu() -> bool:
    """Whether the installed vLLM is the build for the CPU."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server on `host`.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_ports(host: str, count: int) -> list[int]:
    """Ports that no program listens on at the moment, all different."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probes = [socket.socket(family) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def require_free(host: str, ports: Sequence[int]) -> None:
    """Raise ConfigurationError for a port that is taken: its owner would be asked in place of our server."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        with socket.socket(family) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as vLLM does: old connections may linger
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ConfigurationError(f"no server can listen on {host}, port {port}: {error}") from error
