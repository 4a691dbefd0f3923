"""Measures the memory of this process, and remembers its plan for error messages."""

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
# Within a step, freed memory is returned to the operating system if the process has grown by this factor since the last
# return
GROWTH_BEFORE_RETURN = 1.5
# A smaller process keeps its freed memory: to get 100 MB from the system again in each step would make the steps of a
# small model 7 % slower
SMALL_PROCESS_BYTES = 1 << 30
# Planned bytes of this process by its name in messages. There is at most one entry, because a process has one task
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
    """Return a text with the planned memory of this process and its memory in use: on its GPU, or else in main memory."""
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
        # CUDA may raise RuntimeError for every further call after some errors
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

    A worker has no tensors on the GPU, because its engine runs in a child process. In such a worker, asking for the
    free memory would create a CUDA context. That takes some hundred megabytes of the GPU whose memory is short.
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
    """Returns the memory of freed tensors to the operating system, because the C library would keep it.

    Torch allocates tensors in main memory with an alignment. glibc (measured: 2.36) does not reuse the gaps of freed
    tensors for new ones of the same size. So a trainer on a CPU would grow with each micro-batch, although all its
    tensors are freed (docs/log.md, 2026-11-28).
    """

    def __init__(self) -> None:
        self._trim = _malloc_trim()
        self._resident_bytes = 0  # resident memory of this process after the last `release`
        self.release()

    def release(self) -> None:
        """Give all freed memory back. The next tensors take longer, because the system must assign memory to them again."""
        if self._trim is not None:
            self._trim(0)
            self._resident_bytes = resident_bytes()

    def release_within_step(self) -> None:
        """Call `release` if this process has grown by half since the last `release`. A small process does nothing."""
        if resident_bytes() > max(GROWTH_BEFORE_RETURN * self._resident_bytes, SMALL_PROCESS_BYTES):
            self.release()

    def release_after_step(self) -> None:
        """Call `release`. A small process does nothing."""
        if resident_bytes() > SMALL_PROCESS_BYTES:
            self.release()


def _malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc that returns freed memory. Return None if the C library is not glibc."""
    with suppress(OSError, AttributeError):
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    return None
