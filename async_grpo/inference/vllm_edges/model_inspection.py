"""Inspect a model's class in this process on the CPU.

Written for vLLM 0.31 and 0.32. Before an engine starts, vLLM asks the model's class what it supports. The first time on
a machine, and after another version of vLLM has run, vLLM starts a separate process for this, which imports vLLM and
the class and takes 9 s. Its purpose is that CUDA is not initialized in the caller, which does not matter on the CPU.
vLLM has no public setting for it.

Not needed any more when vLLM starts no process for this on the CPU.
"""

from collections.abc import Callable
from typing import TypeVar

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

T = TypeVar("T")


def call(function: Callable[[], T]) -> T:
    """Replace `registry._run_in_subprocess`: call the function here."""
    return function()


def inspect_models_here() -> None:
    """Replace the function that starts the process, only on the CPU."""
    if current_platform.is_cpu():
        registry._run_in_subprocess = call
