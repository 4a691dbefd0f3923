"""Two real gloo ranks, or more, for a test module, and an optimizer that only looks at the gradients."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from forked import FORKED

from async_grpo.launch.process_variables import free_port
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import distributed_run

WORLD_SIZE = 2


def on_two_ranks(
    work: Callable[[Any, Path], Any], folder: Path, deadline_s: float = 120.0, world_size: int = WORLD_SIZE
) -> Any:
    """Return what rank 0 returns of `work(ranks, folder)`, a module's function, which all ranks run."""
    port = free_port()
    context = mp.start_processes(
        _run_rank,
        args=(work, port, folder, world_size, dict(os.environ)),
        nprocs=world_size,
        join=False,
        start_method=FORKED.get_start_method(),
    )
    deadline = time.monotonic() + deadline_s
    while not context.join(timeout=1.0):  # returns as soon as one of them ends
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the {world_size} ranks did not finish within {deadline_s} s")
    return torch.load(folder / "results.pt")


def _run_rank(
    rank: int,
    work: Callable[[Any, Path], Any],
    port: int,
    folder: Path,
    world_size: int,
    environment: dict[str, str],
) -> None:
    torch.set_num_threads(1)
    os.environ.clear()  # it is that of the moment at which the first test of this session started ranks
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with distributed_run("cpu", timeout_s=60) as ranks:
        results = work(ranks, folder)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    os._exit(0)  # gloo's threads may still hold tensors, and abort in an interpreter that ends in order


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class RecordingOptimizer(torch.optim.SGD):
    """Takes no step; keeps the full gradients that it was asked to take one with."""

    def __init__(self, policy: Any) -> None:
        super().__init__(policy.parameters(), lr=0.0)
        self.policy, self.gradients = policy, None

    def step(self) -> None:
        # A weight that the output does not depend on has no gradient
        trained = [(name, p) for name, p in self.policy.named_parameters() if p.grad is not None]
        self.gradients = {name: full(p.grad).clone() for name, p in trained}


def recording_accumulator(policy: Any, objective: Any, ranks: Any, **options: Any) -> tuple[Any, Any]:
    """An accumulator over the policy, sharded already, and the optimizer that looks at its gradients."""
    optimizer = RecordingOptimizer(policy)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    config = OptimizerConfig(**{"max_grad_norm": 1e9, "update_stats": False, "nonfinite_steps": 0} | options)
    return GradientAccumulator(policy, optimizer, scheduler, objective, ranks, config), optimizer


def relative_error(got: dict, expected: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """|got - expected| / |expected| over all tensors together, and the worst single tensor."""
    norm = torch.stack([e.norm() for e in expected.values()]).norm()
    errors = {name: (got[name] - e).norm() for name, e in expected.items()}
    # a tensor whose true gradient is nearly nothing is held against a thousandth of the whole
    worst = max(error / max(expected[name].norm(), 1e-3 * norm) for name, error in errors.items())
    return torch.stack(list(errors.values())).norm() / norm, worst
