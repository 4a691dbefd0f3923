"""One real engine for the tests of a file, and the variables under which engines start here."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from engine_thread import MODEL, ROOT, EngineThread
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def engine_environment() -> Iterator[None]:
    """Small engines that are quiet, find the tests' helpers, and do not each claim cores of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")]))
        yield


@pytest.fixture(scope="module")
def engine(engine_environment) -> Iterator[EngineThread]:
    """One engine of the sample model for the tests of a file."""
    with closing(EngineThread()) as thread:
        yield thread


@pytest.fixture
def model() -> torch.nn.Module:
    """The sample model by transformers, anew for each test."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
