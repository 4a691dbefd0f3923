"""The ranks (processes) of one training run, and the reductions over them."""

import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Float64, Num
from torch import Tensor

from async_grpo.errors import ConfigurationError
from async_grpo.processes.process_tree import die_with

Numbers = Float[Tensor, " _numbers"] | list[float]
# Environment variable with the path of a file through which the ranks of one machine find each other. The file must be
# a new one each time the trainer starts
RANKS_STORE = "ASYNC_GRPO_RANKS_STORE"

# Environment variable with the fraction (0 to 1) of the GPU's memory that this rank may use. If it is not set, the rank
# may use all of the memory
GPU_SHARE = "ASYNC_GRPO_GPU_SHARE"


@dataclass(frozen=True)
class Ranks:
    """The place of this process among the trainer's processes. All methods except `synchronize` are collectives."""

    rank: int  # index of this process, from 0
    world_size: int  # number of processes
    device: torch.device  # device on which this process computes

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until the device has finished its work, so that a time measured afterwards includes this work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sum(self, values: list[float]) -> list[float]:
        """Return the element-wise sum over all ranks."""
        return self.sum_and_max(values, [])[0].tolist()

    def max(self, values: list[float]) -> list[float]:
        """Return the element-wise maximum over all ranks."""
        return self.sum_and_max([], values)[1].tolist()

    def sum_and_max(
        self, sums: Numbers, maxima: Numbers
    ) -> tuple[Float64[Tensor, " sums"], Float64[Tensor, " maxima"]]:
        """Return the element-wise sums of `sums` and maxima of `maxima` over all ranks, on the CPU.

        One call for both is cheaper than two, because the device is synchronized only once.
        """
        summed = torch.as_tensor(sums, dtype=torch.float64, device=self.device)
        highest = torch.as_tensor(maxima, dtype=torch.float64, device=self.device)
        if self.world_size > 1 and len(summed):
            dist.all_reduce(summed, dist.ReduceOp.SUM)
        if self.world_size > 1 and len(highest):
            dist.all_reduce(highest, dist.ReduceOp.MAX)
        summed, highest = torch.cat([summed, highest]).cpu().split([len(sums), len(maxima)])
        return summed, highest

    def gathered(self, tensor: Num[Tensor, "*shape"]) -> Float64[Tensor, " ranks *shape"]:
        """Return the tensors of all ranks, stacked, on the CPU. All tensors must have the same shape."""
        table = torch.zeros(self.world_size, *tensor.shape, dtype=torch.float64)
        table[self.rank] = tensor.cpu()
        return self.sum_and_max(table.flatten(), [])[0].view_as(table)

    def must_agree(self, subject: str, text: str) -> None:
        """Raise ConfigurationError on every rank if the ranks' texts differ."""
        # The first 48 bits of the digest, which float64 represents exactly
        number = float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
        highest, negated_lowest = self.max([number, -number])
        if highest != -negated_lowest:
            raise ConfigurationError(
                f"{subject} is not the same on every rank: give all nodes the same files"
            )


@contextmanager
def distributed_run(device: str = "auto", *, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """Join the process group for the duration of the `with` block.

    Rank and world size come from torchrun's environment variables. The ranks find each other through the file that
    ASYNC_GRPO_RANKS_STORE names or, if the variable is not set, at MASTER_ADDR and MASTER_PORT. If torchrun dies, the
    kernel kills its ranks (Linux only).

    Args:
        device: "cpu" (gloo), "cuda" (nccl), or "auto", which is cuda if there is a GPU.
        timeout_s: Longest duration of a collective.

    Raises:
        ConfigurationError: The process should use a GPU, but there are fewer GPUs than processes.
    """
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        # If torchrun dies, the kernel ends this process with SIGKILL, because a rank inside a collective cannot run
        # signal handlers
        die_with(os.getppid())
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    rank_device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    )
    if on_gpu and rank_device.index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"local rank {rank_device.index} has no GPU: {torch.cuda.device_count()} are visible; "
            "start as many processes per node as there are GPUs, or use the CPU"
        )
    if on_gpu:
        torch.cuda.set_device(rank_device)
        if GPU_SHARE in os.environ:
            # An engine uses the same GPU. If this rank exceeds its share, the rank itself and not the engine runs out
            # of memory
            torch.cuda.set_per_process_memory_fraction(float(os.environ[GPU_SHARE]), rank_device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=_store(world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=rank_device if on_gpu else None,
    )
    try:
        yield Ranks(rank, world_size, rank_device)
    except BaseException:
        # Skip the orderly shutdown of NCCL: it would wait for collectives that a failed rank never joins
        if not on_gpu:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _store(world_size: int) -> Any:
    """Return the `Store` through which the ranks find each other. None means torch's server at MASTER_ADDR:MASTER_PORT.

    torch's server listens on all interfaces without authentication, so ranks of one machine use a file.
    """
    if world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # torch lists the class in no __all__
    path = os.environ.get(RANKS_STORE)
    if path:
        return dist.FileStore(path, world_size)  # type: ignore[attr-defined]  # not in __all__ either
    return None


def leave(code: int = 0) -> None:
    """Flush the output and end this process at once, without shutting down the Python interpreter.

    During a shutdown, Gloo's threads may still hold tensors and then abort the process, which torchrun reports as a
    failed run.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
