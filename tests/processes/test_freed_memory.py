"""Memory of freed tensors goes back to the operating system: always when told, and else when a process has grown much."""

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


@pytest.fixture
def resident(monkeypatch) -> list[int]:
    """The resident memory in MiB that is reported, which the tests change."""
    resident = [0]
    monkeypatch.setattr(memory_use, "resident_bytes", lambda: resident[0] * MIB)
    return resident


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """The calls of glibc's function."""
    calls: list[int] = []
    monkeypatch.setattr(memory_use, "_malloc_trim", lambda: calls.append)
    return calls


def test_within_a_step_memory_is_returned_only_when_the_process_has_grown_by_half(resident, calls):
    resident[0] = 1000
    freed_memory = FreedMemory()
    assert calls == [0]
    for size, expected_calls in ((1490, 1), (1510, 2), (2200, 2), (2300, 3)):
        resident[0] = size
        freed_memory.release_within_step()
        assert len(calls) == expected_calls, size


def test_a_small_model_s_steps_do_not_wait_for_memory_to_be_assigned_anew(resident, calls):
    resident[0] = 240
    freed_memory = FreedMemory()
    for size in (370, 490, 1020):
        resident[0] = size
        freed_memory.release_within_step()
        freed_memory.release_after_step()
    assert len(calls) == 1
    resident[0] = 1030
    freed_memory.release_after_step()
    assert len(calls) == 2


def test_after_a_step_a_large_process_returns_all_freed_memory(resident, calls):
    resident[0] = 10_000
    freed_memory = FreedMemory()
    freed_memory.release_within_step()
    assert len(calls) == 1
    freed_memory.release_after_step()
    assert len(calls) == 2


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(memory_use, "_malloc_trim", lambda: None)
    freed_memory = FreedMemory()
    freed_memory.release()
    freed_memory.release_within_step()
    freed_memory.release_after_step()
