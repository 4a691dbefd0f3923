"""How much memory this process takes, and how much it was planned to take."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.filesize import decimal

KIB = 1024
# Before the end of a step, memory is returned to the operating system if the process holds this many times what it held
# after the last return
GROWTH_BEFORE_RETURN = 1.5
# A process that holds less keeps its freed memory. To assign 100 MB anew in each step would make the steps of a small model
# 7 % slower
SMALL_PROCESS_BYTES = 1 << 30
# The estimate for this process in bytes, by the name of the process: at most one entry, because a process has one task
_planned_bytes: dict[str, int] = {}


def note_plan(process: str, num_bytes: float) -> None:
    """Remember the estimated memory of this process, for the messages of errors.

    Args:
        process: Name of the process, such as "this engine".
        num_bytes: The estimate.
    """
    _planned_bytes.clear()
    _planned_bytes[process] = int(num_bytes)


def memory_in_words() -> str:
    """Return what this process was planned to take and what is in use: of its GPU, or else of the main memory."""
    parts = [f"planned for {name}: about {decimal(size)}" for name, size in _planned_bytes.items()]
    cuda = _cuda()
    if cuda is None:
        resident_bytes = psutil.Process().memory_info().rss
        machine = psutil.virtual_memory()
        parts.append(
            f"in use by this process: {decimal(resident_bytes)} of main memory; free on the machine: "
            f"{decimal(machine.available)} of {decimal(machine.total)}"
        )
    elif cuda.is_initialized() and cuda.memory_reserved():
        # After some errors, CUDA answers no more questions
        with suppress(RuntimeError):
            free_bytes, total_bytes = cuda.mem_get_info()
            parts.append(
                f"in use by this process: {decimal(cuda.memory_allocated())} of the GPU in tensors, "
                f"{decimal(cuda.memory_reserved())} with its allocator's reserve; free: {decimal(free_bytes)} of "
                f"{decimal(total_bytes)}"
            )
    return "; ".join(parts)


def _cuda() -> Any | None:
    """Return `torch.cuda` if this process has imported torch and may use a GPU, else None.

    The engine's process on a GPU is a child of its worker, which has no tensors on the GPU. A question about free memory
    would make a CUDA context in such a process: some hundred megabytes of the GPU that is short of memory.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return torch.cuda


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process since its start, in bytes."""
    return KIB * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def peak_resident_bytes_of(process_ids: Iterable[int]) -> int:
    """Return the sum of the largest resident memories of several processes, in bytes.

    Memory that the processes share counts several times. Processes that have ended count as 0.
    """
    return sum(map(_peak_of, process_ids))


def _peak_of(process_id: int) -> int:
    if process_id == os.getpid():
        return peak_resident_bytes()
    with suppress(OSError):
        for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return KIB * int(line.split()[1])
    return 0


class FreedMemory:
    """Returns the memory of freed tensors to the operating system, where the C library keeps it.

    Torch allocates tensors in main memory with an alignment. glibc (measured: 2.36) does not find room for them in the gaps
    that earlier ones of the same size left, so that a trainer on a CPU grows with each micro-batch, although all tensors
    are freed (docs/log.md, 2026-11-28).
    """

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._resident_bytes = 0  # what this process held after the last return
        self.release()

    def release(self) -> None:
        """Return all freed memory. The next tensors take longer, because the system must assign their memory anew."""
        if self._trim is not None:
            self._trim(0)
            self._resident_bytes = resident_bytes()

    def release_within_step(self) -> None:
        """Return all freed memory if this process has grown by half since the last time. A small process keeps it."""
        if resident_bytes() > max(GROWTH_BEFORE_RETURN * self._resident_bytes, SMALL_PROCESS_BYTES):
            self.release()

    def release_after_step(self) -> None:
        """Return all freed memory. A small process keeps it."""
        if resident_bytes() > SMALL_PROCESS_BYTES:
            self.release()


def _malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc that returns freed memory; None in another C library."""
    with suppress(OSError, AttributeError):
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    return None
