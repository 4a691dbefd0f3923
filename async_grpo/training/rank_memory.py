"""Measures the memory of one trainer rank in each step, for the comparison with the memory plan."""

from dataclasses import dataclass

import torch

from async_grpo.processes.memory_use import note_plan, peak_resident_bytes


@dataclass(frozen=True)
class RankMemory:
    """Measures the peak memory of this process.

    It is the memory of the tensors on the GPU or, if the process computes on the CPU, its resident memory.
    """

    device: torch.device
    planned_bytes: int = 0  # estimate of weights, gradients, moments and activations; 0 if it is unknown
    # Resident memory in bytes before the model was loaded, mostly of imported libraries; 0 on a GPU
    baseline_bytes: int = 0

    def __post_init__(self) -> None:
        if self.planned_bytes:
            note_plan("this trainer rank", self.planned_bytes)

    def take_peak_bytes(self) -> int:
        """Return the peak in bytes since the last call on a GPU, and since the start of the process on the CPU."""
        if self.device.type != "cuda":
            return peak_resident_bytes()
        num_bytes = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return num_bytes
