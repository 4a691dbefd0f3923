"""How much memory this process takes, and how much it was planned to take."""

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.filesize import decimal

KIB = 1024
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
