"""One real engine for the tests of a file, and the variables under which engines start here."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from engine_thread import MODEL, EngineThread
from transformers import AutoModelForCausalLM
from warm_servers import VARIABLES


@pytest.fixture(scope="module")
def engine_environment(warm) -> Iterator[None]:
    """Small engines that find the tests' helpers, and start as forks of a process that has imported vLLM."""
    with pytest.MonkeyPatch.context() as patch, warm.starting_engines():
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
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
