"""The ranks of one training run, started by torchrun or alone, and the few sums that they must agree on."""

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
from torch import Tensor

from async_grpo.errors import ConfigurationError
from async_grpo.processes.process_tree import die_with

Numbers = Tensor | list[float]
# Variable: a file, new for each start, by which the ranks of one machine meet
RANKS_STORE = "ASYNC_GRPO_RANKS_STORE"


@dataclass(frozen=True)
class Ranks:
    """This process among the trainer's processes. Its methods but `synchronize` are collectives."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def synchronize(self) -> None:
        """Wait until the device has done what it was given: before that, a clock reads launch times."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sum(self, values: list[float]) -> list[float]:
        """The element-wise sum over all ranks."""
        return self.sum_and_max(values, [])[0].tolist()

    def max(self, values: list[float]) -> list[float]:
        """The element-wise maximum over all ranks."""
        return self.sum_and_max([], values)[1].tolist()

    def sum_and_max(self, sums: Numbers, maxima: Numbers) -> tuple[Tensor, Tensor]:
        """Element-wise over all ranks, (A,) and (B,) float64, on the CPU then; the device is waited for once."""
        both = [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in (sums, maxima)]
        for values, operation in zip(both, (dist.ReduceOp.SUM, dist.ReduceOp.MAX), strict=True):
            if self.world_size > 1 and len(values):
                dist.all_reduce(values, operation)
        summed, highest = torch.cat(both).cpu().split([len(sums), len(maxima)])
        return summed, highest

    def gathered(self, own: Tensor) -> Tensor:
        """Return (ranks, ...) float64 on the CPU: the tensor of each rank, all of one shape."""
        table = torch.zeros(self.world_size, *own.shape, dtype=torch.float64)
        table[self.rank] = own.cpu()
        return self.sum_and_max(table.flatten(), [])[0].view_as(table)

    def must_agree(self, what: str, text: str) -> None:
        """Raises ConfigurationError on every rank if the ranks' texts differ."""
        number = float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))  # 48 bits: exact in float64
        highest, negated_lowest = self.max([number, -number])
        if highest != -negated_lowest:
            raise ConfigurationError(f"{what} is not the same on every rank: give all nodes the same files")


@contextmanager
def distributed_run(device: str = "auto", *, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """Join the process group for the length of the `with` block.

    device: "cpu" (gloo), "cuda" (nccl), or "auto": cuda where there is one. timeout_s: of a collective. Rank and world
    size come from torchrun's environment, and so does the place where the ranks meet: the file that
    ASYNC_GRPO_RANKS_STORE names, or the address of MASTER_ADDR and MASTER_PORT. The kernel kills a rank when its
    torchrun dies (Linux only).
    ConfigurationError: no such device.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "RANK" in os.environ:
        die_with(os.getppid())  # SIGKILL, because a rank inside a collective does not get to run handlers
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu and chosen.index >= torch.cuda.device_count():
        raise ConfigurationError(
            f"local rank {chosen.index} has no GPU: {torch.cuda.device_count()} are visible; "
            "start as many processes per node as there are GPUs, or use the CPU"
        )
    if on_gpu:
        torch.cuda.set_device(chosen)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=_store(world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=chosen if on_gpu else None,
    )
    try:
        yield Ranks(rank, world_size, chosen)
    except BaseException:
        # Taking NCCL down in an orderly way waits for collectives that a failed rank will never join
        if not on_gpu:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _store(world_size: int) -> Any:
    """Return the `Store` by which the ranks meet; None for the one that listens at MASTER_ADDR and MASTER_PORT.

    That one has no key, and listens on all interfaces. Ranks of one machine can do without.
    """
    if world_size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]  # torch names it in no __all__
    if path := os.environ.get(RANKS_STORE):
        return dist.FileStore(path, world_size)  # type: ignore[attr-defined]  # as above
    return None


def leave(code: int = 0) -> None:
    """End this process now, its output flushed, without taking the interpreter down.

    Gloo's threads may still hold tensors when Python is finalised, and then abort: torchrun would call the run failed.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
