"""Join a Ray cluster, find a run by its name, call its controller, and create actors."""

import contextlib
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import (
    AuthenticationError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
    UnserializableException,
)

from async_grpo.errors import AsyncGrpoError, ConfigurationError, DeadlineExceeded, WorkerLost
from async_grpo.processes.device_variables import is_cluster_variable

# Environment variables that are passed to other processes through Ray, in addition to those that `is_cluster_variable`
# selects. All users of the cluster can read Ray's job table, so no variable that may hold a key is passed. Variables
# that describe one node (devices, addresses, interfaces) are not passed either
FORWARDED = """
    PYTHONPATH HF_HUB_OFFLINE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM OMP_NUM_THREADS MKL_NUM_THREADS
""".split()

CONTROLLER = "controller"  # name of the run's `RunController`
CONTROL_TIMEOUT_S = 60.0  # timeout of calls that transfer only a few numbers
CONNECT_TIMEOUT_S = 5.0
# Environment variable with the path of a file that is created when the Ray cluster of `async-grpo run` is up
RAY_IS_UP = "ASYNC_GRPO_RAY_IS_UP"
RAY_START_S = 90.0
# Maximum number of characters of an error message in a log line about an actor, if the error comes from this library
MAX_OWN_CHARACTERS = 1500
MAX_FOREIGN_CHARACTERS = 300  # the same for an error of another package
HOW_TO_JOIN = (
    "Start one with `RAY_AUTH_MODE=token ray start --head`, and set RAY_AUTH_MODE=token for every process that joins "
    "it (and RAY_ADDRESS, if the head is on another machine). On the first node, `ray get-auth-token --generate` makes "
    "the token ~/.ray/auth_token: copy that file to the other nodes"
)

log = logging.getLogger(__name__)


def forwarded_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that workers get from this process.

    >>> forwarded_environment({"OMP_NUM_THREADS": "1", "VLLM_API_KEY": "secret", "CUDA_VISIBLE_DEVICES": "0"})
    {'OMP_NUM_THREADS': '1'}
    """
    names = (name for name in environment if name in FORWARDED or is_cluster_variable(name))
    return {name: environment[name] for name in names}


def connect(run_name: str, logging_level: str = "INFO") -> None:
    """Join the running Ray cluster in a namespace of the run, so that runs on one cluster do not see each other.

    Raises:
        ConfigurationError: There is no cluster, or it refuses this process. The message says how to start one.
    """
    # Wait for Ray until this time. If it is not up by then, `ray.init` finds no cluster and raises an error
    deadline = time.monotonic() + RAY_START_S
    while not os.path.exists(os.environ.get(RAY_IS_UP, "/")) and time.monotonic() < deadline:
        time.sleep(0.05)
    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            # Test the address first: this fails within seconds if nothing listens there, while `ray.init` would try for
            # minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        ray.init(
            address=address,
            namespace=f"async-grpo/{run_name}",
            log_to_driver=logging_level == "DEBUG",
            logging_level=logging.WARNING,
            runtime_env={"env_vars": forwarded_environment()},
        )
    except (OSError, RuntimeError, ValueError, AuthenticationError) as error:
        raise ConfigurationError(
            f"no Ray cluster to join at RAY_ADDRESS {address} ({str(error).splitlines()[0]}). {HOW_TO_JOIN}"
        ) from error


def find_controller(run_name: str, deadline_s: float) -> Any:
    """Wait for the run's controller to appear, and return its handle.

    Raises:
        DeadlineExceeded: The controller did not appear in time.
    """
    wait = f"waiting for a trainer to open the run {run_name!r}"
    log.info("%s ...", wait)
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        with contextlib.suppress(ValueError):
            return ray.get_actor(CONTROLLER)
        time.sleep(0.2)
    raise DeadlineExceeded(f"{wait}: no answer for {deadline_s:.0f} s")


def answer(reference: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
    """Wait for an answer from the run's controller. Errors of the controller are raised without Ray's wrapping.

    Raises:
        DeadlineExceeded: No answer came in time.
        WorkerLost: The controller died, which ends the run.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        raise getattr(error, "cause", None) or error from None
    except GetTimeoutError as error:
        raise DeadlineExceeded(f"the run's controller did not answer within {timeout_s:.0f} s") from error
    except RayActorError as error:
        raise WorkerLost(f"the run's controller died: {cause_of(error)}") from error


def cause_of(error: Exception) -> str:
    """Return an actor's error or cause of death as one line, without Ray's wrapping and colors."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, UnserializableException):
        # The class of the error is in a package that only the actor has, so use the last line of its traceback, which
        # contains the message
        *_, last_line = str(cause).strip().splitlines()
        return last_line[:MAX_FOREIGN_CHARACTERS]
    text = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(str(cause).split()))
    # Messages of this library may be longer, because they are complete sentences whose ends say what to do
    limit = MAX_OWN_CHARACTERS if isinstance(cause, AsyncGrpoError) else MAX_FOREIGN_CHARACTERS
    return f"{type(cause).__name__}: {text[:limit]}"


def on_this_node() -> dict[str, Any]:
    """Return the options of an actor that must run on this process's node.

    They request the resource that Ray defines for each node. A soft NodeAffinity is not reliable: Ray 2.60 placed 3 of
    8 actors on other nodes.
    """
    return {"resources": {f"node:{ray.util.get_node_ip_address()}": 0.0001}}


def warm_python(library: str) -> dict[str, str]:
    """Return the runtime_env entry for an actor on this node in whose process a library is already imported.

    `async-grpo run` provides a Python executable for this purpose in an environment variable. Without it, return {}.

    Args:
        library: "torch", or "vllm", which includes torch.
    """
    executable = os.environ.get(f"ASYNC_GRPO_WARM_{library.upper()}")
    return {"py_executable": executable} if executable else {}


def zero_cpu_actor(actor_class: type, **options: Any) -> Any:
    """Return `actor_class` ready for `.remote(...)`. It reserves no CPU, so that it also starts on a small machine."""
    defaults = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": 10_000}
    return ray.remote(actor_class).options(**(defaults | options))
