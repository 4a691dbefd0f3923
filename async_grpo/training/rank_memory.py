"""The memory of one trainer rank: what it takes in each step, and what it was planned to take."""

from dataclasses import dataclass

import torch

from async_grpo.processes.memory_use import note_plan, peak_resident_bytes


@dataclass(frozen=True)
class RankMemory:
    """Measures the peak memory of this process: of its GPU's tensors or, on the CPU, its resident memory."""

    device: torch.device
    planned_bytes: int = 0  # estimate of weights, gradients, moments and activations; 0 if it is unknown
    # Resident memory before the model was loaded, such as that of the imported libraries; 0 on a GPU
    baseline_bytes: int = 0

    def __post_init__(self) -> None:
        if self.planned_bytes:
            note_plan("this trainer rank", self.planned_bytes)

    def take_peak_bytes(self) -> int:
        """Return the peak since the last call; on the CPU, the peak since the start of the process."""
        if self.device.type != "cuda":
            return peak_resident_bytes()
        num_bytes = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return num_bytes
