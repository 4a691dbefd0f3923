"""Measure what a checkpoint costs: the time for which training waits, its size on the disk, and its memory.

    python -m benchmarks.saving                      # a model of 30 M parameters, about 2 minutes
    python -m benchmarks.saving --model FOLDER

If checkpoints are saved every CADENCE seconds, they cost the training at most the fraction (seconds of waiting + CPU
seconds of writing / cores) / CADENCE. This assumes that all CPU time of writing is lost for the training.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch

from async_grpo.modeling.load import load_causal_lm
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.checkpoint import Checkpointer
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import distributed_run
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy
from benchmarks.against_trl.models import model_folder

CADENCE_S = 600.0  # seconds between two checkpoints, the default of --checkpoint-every-s


class PeakMemory:
    """Measures by how many bytes the memory of this process grows at most within a `with` block."""

    def __enter__(self) -> "PeakMemory":
        self._process, self._over = psutil.Process(), threading.Event()
        self._before, self.extra = self._process.memory_info().rss, 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.extra = max(self.extra, self._process.memory_info().rss - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--saves", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, distributed_run("cpu", timeout_s=60) as ranks:
        model = options.model or model_folder("30m", Path(folder) / "models")
        policy = shard_policy(PolicyModel(load_causal_lm(str(model), "float32")), ranks)
        optimizer, scheduler = build_policy_optimizer(policy, OptimizerConfig(), 100)
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        given = {"keep": 2, "timeout_s": 600.0, "options": {}, "inputs": {}}
        checkpointer = Checkpointer(Path(folder), ranks, policy, scheduler, **given)
        state = 3 * sum(4 * parameter.numel() for parameter in policy.parameters())
        print(f"weights and moments: {state / 2**20:.0f} MiB; {os.cpu_count()} cores")
        waits, costs = [], []
        for step in range(1, options.saves + 1):
            begun, cpu = time.monotonic(), time.process_time()
            with PeakMemory() as memory:
                checkpointer.save(step, step)
                waited, cpu_waited = time.monotonic() - begun, time.process_time() - cpu
                assert checkpointer.wait()
            took, written = time.monotonic() - begun, time.process_time() - cpu - cpu_waited
            cost = (waited + written / (os.cpu_count() or 1)) / CADENCE_S
            print(
                f"save {step}: training waited {waited:.2f} s; whole after {took:.2f} s, {written:.2f} s of CPU; "
                f"memory {memory.extra / state:.2f} copies; at most {cost:.2%} every {CADENCE_S:.0f} s"
            )
            waits.append(waited)
            costs.append(cost)
        print(f"median: {statistics.median(waits):.2f} s, {statistics.median(costs):.2%}")


if __name__ == "__main__":
    main()
