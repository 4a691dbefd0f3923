"""Check that driver, CUDA, torch and vLLM fit together. If they do not, a run fails late, with a misleading message."""

import os
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from async_grpo.errors import ConfigurationError
from async_grpo.inference.engine_python import VLLM_PACKAGES, check_environment
from async_grpo.launch.plan import ERROR, NVIDIA_SMI_TIMEOUT_S, OK, Finding

# Major version of CUDA -> oldest major version of the driver that runs programs built for it
# (docs.nvidia.com/deploy/cuda-compatibility)
OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
INSTALL = "pip install -r requirements_gpu.lock, in a new environment (docs/first-gpu-run.md)"


def compare_versions(engine_python: str = "") -> Iterator[Finding]:
    """Compare the versions of driver, CUDA, torch and vLLM, including those in the environment of `--engine-python`."""
    from torch.version import cuda  # None in a build for the CPU

    driver = driver_version()
    torch_version = version("torch")
    built_for = f"built for CUDA {cuda}" if cuda else "built for the CPU"
    text = f"torch {torch_version}, {built_for}; {f'driver {driver}' if driver else 'no driver of GPUs'}"
    problem = cure = ""
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if driver and not cuda and not hides_gpus:
        problem = "there are GPUs, which this torch cannot use"
        cure = f"{INSTALL}, or CUDA_VISIBLE_DEVICES= for the CPU"
    if driver and cuda:
        oldest = OLDEST_DRIVERS.get(int(cuda.split(".")[0]), max(OLDEST_DRIVERS.values()))
        if Version(driver).major < oldest:
            problem = f"CUDA {cuda} needs driver {oldest} or newer"
            cure = f"install that driver, or builds of torch and vLLM for the CUDA of driver {driver}"
    engine = vllm_torch()
    engine_torch = torch_version
    pip = "pip"
    if engine_python:
        try:
            engines = check_environment(engine_python)
        except ConfigurationError as refusal:
            problem, _, cure = str(refusal).rpartition(": ")
            yield Finding("versions", ERROR, f"{text}: {problem}", cure)
            return
        text += f"; engines in {engine_python}: {engines}"
        requirement_there = torch_requirement(engines.vllm_needs)
        engine = ("their vLLM", requirement_there) if requirement_there else None
        engine_torch = engines.versions.get("torch", "0")
        pip = f"{engine_python} -m pip"
    if engine is not None:
        name, requirement = engine
        text += f"; {name} is built for torch{requirement.specifier}"
        if not requirement.specifier.contains(engine_torch, prereleases=True):
            problem = f"{name} does not work with torch {engine_torch}"
            cure = f"{pip} install 'torch{requirement.specifier}'; {INSTALL}"
    yield Finding("versions", ERROR if problem else OK, f"{text}: {problem}" if problem else text, cure)


def driver_version() -> str:
    """Return the version of the GPUs' driver, or "" if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.split("\n")[0].strip()


def vllm_torch() -> tuple[str, Requirement] | None:
    """Return name and version of the installed vLLM, and its requirement on torch; None if there is no vLLM."""
    for name in VLLM_PACKAGES:
        try:
            requirement = torch_requirement(requires(name) or [])
        except PackageNotFoundError:
            continue
        if requirement is not None:
            return f"{name} {version(name)}", requirement
    return None


def torch_requirement(requirements: Iterable[str]) -> Requirement | None:
    """Return a package's requirement on torch that applies to this platform; None if there is none."""
    for requirement in map(Requirement, requirements):
        is_for_this_platform = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == "torch" and is_for_this_platform:
            return requirement
    return None
