"""A lack of memory is named with what was done, what was planned and in use, and what to change; other errors are not."""

import errno
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from async_grpo.errors import ConfigurationError, OutOfMemory
from async_grpo.processes import memory_use
from async_grpo.processes.memory_use import memory_in_words, note_plan, peak_resident_bytes_of, resident_bytes
from async_grpo.processes.out_of_memory import naming_out_of_memory

CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 "
    "bytes. Error code 12 (Cannot allocate memory)"
)
LACKS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError(CPU_MESSAGE),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
    MemoryError("Unable to allocate 8. GiB for an array"),
    OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ValueError("(2.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)"),
    ValueError(
        "Available memory on node 0 on kv cache allocation is less than requested memory for kv (9 GiB)"
    ),
    ValueError("Free memory on device cuda:0 is less than desired GPU memory utilization (0.9, 72 GiB)"),
]


@pytest.fixture(autouse=True)
def no_plan(monkeypatch):
    monkeypatch.setattr(memory_use, "_planned_bytes", {})


@pytest.mark.parametrize("error", LACKS, ids=lambda error: f"{type(error).__name__} {str(error)[:30]}")
def test_every_kind_of_lack_is_named(error):
    note_plan("this trainer rank", 3.2e9)
    with pytest.raises(OutOfMemory) as named, naming_out_of_memory("in the forward pass", "lower --a"):
        raise error
    text = str(named.value)
    assert text.startswith(
        "out of memory in the forward pass: lower --a (planned for this trainer rank: about 3.2 GB;"
    )
    assert "in use by this process: " in text and f"{type(error).__name__}: {error}"[:100] in text
    assert str(pickle.loads(pickle.dumps(named.value))) == text


def test_a_lack_is_seen_behind_the_error_that_it_caused():
    with pytest.raises(OutOfMemory, match="Tried to allocate"), naming_out_of_memory("here", "lower it"):
        try:
            raise LACKS[0]
        except RuntimeError as lack:
            raise ValueError("the step failed") from lack


def test_a_lack_that_was_mended_is_not_the_cause_of_what_follows():
    with pytest.raises(ValueError, match="another"), naming_out_of_memory("here", "lower it"):
        try:
            raise LACKS[0]
        except RuntimeError:
            raise ValueError("another mistake") from None


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), ConfigurationError("out of memory is a word"), KeyError("memory")],
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, naming_out_of_memory("here", "lower it"):
        raise error
    assert raised.value is error


def test_on_a_gpu_the_gpu_s_memory_is_told(monkeypatch):
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        mem_get_info=lambda: (10**9, 80 * 10**9),
        memory_allocated=lambda: 70 * 10**9,
        memory_reserved=lambda: 75 * 10**9,
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    assert memory_in_words() == (
        "in use by this process: 70.0 GB of the GPU in tensors, 75.0 GB with its allocator's reserve; free: 1.0 GB of "
        "80.0 GB"
    )
    cuda.mem_get_info = lambda: pytest.fail("asking takes memory of the GPU in a process that has none of it")
    cuda.memory_reserved = lambda: 0
    assert memory_in_words() == ""
    cuda.is_initialized = lambda: False
    assert memory_in_words() == ""


def test_peaks_are_those_of_the_processes():
    child = subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(300 << 20); del x; print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        child.stdout.readline()
        assert 300 << 20 < peak_resident_bytes_of([child.pid]) < 400 << 20
        assert peak_resident_bytes_of([os.getpid(), child.pid]) > resident_bytes() + (300 << 20)
    finally:
        child.communicate(b"\n")
    assert peak_resident_bytes_of([child.pid]) == 0


CHILD_OF_ENGINE = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(log, 2)
print("WARNING: larger values may run out of memory", file=sys.stderr)
print(sys.argv[2], file=sys.stderr, flush=True)
from async_grpo.processes.out_of_memory import naming_out_of_memory
try:
    with naming_out_of_memory("while an engine started", "lower it", searches_log=True):
        raise RuntimeError("Engine core initialization failed. See root cause above.")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("(EngineCore pid=7) ERROR core.py:9] RuntimeError: " + CPU_MESSAGE, True),
        ("(EngineCore pid=7) ERROR core.py:9] ImportError: no module", False),
    ],
)
def test_the_lack_of_a_child_process_is_found_in_the_log(tmp_path, line, named):
    """vLLM's engine says to its client only that it died."""
    command = [sys.executable, "-c", CHILD_OF_ENGINE, str(tmp_path / "log"), line]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.startswith(
        "OutOfMemory out of memory while an engine started: lower it (" if named else "RuntimeError"
    )
    assert ("DefaultCPUAllocator" in output) == named
