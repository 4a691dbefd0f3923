"""Memory of freed tensors goes back to the operating system: always when told, and else when a process has grown."""

import pytest
import torch

from async_grpo.processes import memory_use
from async_grpo.processes.memory_use import FreedMemory, resident_bytes

MIB = 1 << 20


@pytest.mark.skipif(memory_use._malloc_trim() is None, reason="the C library is not glibc")
def test_gaps_between_tensors_are_returned():
    freed_memory = FreedMemory()
    before = resident_bytes()
    # Smaller than the blocks that glibc returns by itself. Every second one stays, so that there are gaps
    tensors = [torch.ones(64 * 1024 // 4) for _ in range(4000)]
    grown = resident_bytes() - before
    assert grown > 200 * MIB
    del tensors[::2]
    freed_memory.release()
    assert resident_bytes() - before < 0.75 * grown
    del tensors
    freed_memory.release()
    assert resident_bytes() - before < 30 * MIB


def test_within_a_step_memory_is_returned_only_when_the_process_has_grown(monkeypatch):
    calls = []
    resident = [100]
    monkeypatch.setattr(memory_use, "_malloc_trim", lambda: calls.append)
    monkeypatch.setattr(memory_use, "resident_bytes", lambda: resident[0])
    freed_memory = FreedMemory()
    assert calls == [0]
    for num_bytes, expected_calls in ((149, 1), (151, 2), (220, 2), (230, 3)):
        resident[0] = num_bytes
        freed_memory.release_if_grown()
        assert len(calls) == expected_calls, num_bytes


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory_use, "_malloc_trim", lambda: None)
    freed_memory = FreedMemory()
    freed_memory.release()
    freed_memory.release_if_grown()
