"""Measure what a weight sync costs, through the object store or shared files, to two real engines on this machine.

    python -m benchmarks.weight_sync                          # a random 0.5 B model in bfloat16, three minutes
    python -m benchmarks.weight_sync --layers 4 --hidden 256 --vocabulary 4096 --transport shared_files

For each sync it prints how long the trainer was BLOCKED (gather, cast, pack), how long each engine PAUSED, the time
from the call to the proof, and the time of a copy of the same bytes in memory. It also prints by how much memory grew
at its peak, in the processes and /dev/shm together. The canary is one short text, because a CPU takes seconds for a
long one.
"""

import argparse
import os
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
GB = 1e9


def make_model(folder: Path, layers: int, hidden: int, vocabulary: int) -> None:
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": round(5.43 * hidden / 64) * 64,
    }
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=True, **shape, **heads))
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "sample-data" / "tiny-model").save_pretrained(folder)


def held() -> float:
    """Return the bytes of memory that are in use on this machine, including shared memory."""
    memory = psutil.virtual_memory()
    return memory.total - memory.available


@contextmanager
def peak_over(base: float, found: dict[str, float]):
    """Record by how much `held` exceeds `base` at most while the block runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            found["peak"] = max(found.get("peak", 0.0), held() - base)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    yield
    done.set()
    watching.join()


def memcpy_s(bytes_: int) -> float:
    source, target = np.ones(bytes_, np.uint8), np.empty(bytes_, np.uint8)
    target[:] = 0  # writing to the array makes the system assign its memory before the copy is timed
    begun = time.monotonic()
    target[:] = source
    return time.monotonic() - begun


class Engines:
    """Two real engines, registered with a controller, and the publisher that sends weights to them."""

    def __init__(self, folder: Path, vocabulary: int, count: int, transport: str) -> None:
        from async_grpo.cluster import worker_actors
        from async_grpo.cluster.channel import Channel
        from async_grpo.cluster.controller import RunController
        from async_grpo.cluster.ray_session import zero_cpu_actor
        from async_grpo.cluster.weight_sync import RayEngines
        from async_grpo.config.run import WorkerConfig
        from async_grpo.messages import SharedRunSettings, WorkerInfo
        from async_grpo.modeling.load import load_causal_lm, model_fingerprint
        from async_grpo.modeling.policy import PolicyModel, named_weights
        from async_grpo.options.source_file import library_version
        from async_grpo.training.sharding import canary_logprobs
        from async_grpo.weights.canary import Canary
        from async_grpo.weights.config import WeightConfig, get_transport

        fingerprint = model_fingerprint(folder)
        settings = SharedRunSettings(
            *("sync", fingerprint, vocabulary, "bfloat16", 1.0, (3,), 64, 32, "object_store", (), 0),
            library=library_version(),
        )
        make = zero_cpu_actor(RunController)
        self.controller = make.remote(settings, 60.0, Channel, "least_loaded")
        config = WorkerConfig(mode="generation", model_path=str(folder), enforce_eager=True, max_num_seqs=16)
        environment = {
            "env_vars": worker_actors.ENGINE_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        }
        self.actors = []
        for number in range(count):
            actor = zero_cpu_actor(worker_actors.GenerationActor, runtime_env=environment).remote()
            ray.get(actor.start.remote(config, settings), timeout=300)
            info = WorkerInfo(f"g{number}", "generation", 16, 1000)
            ray.get(self.controller.register.remote(info, actor), timeout=60)
            self.actors.append(actor)
        self.policy = PolicyModel(load_causal_lm(folder, "float32"))
        canary = Canary([Canary.text(vocabulary, 4)], canary_logprobs)
        link = RayEngines(self.controller, 300)
        config = WeightConfig(weight_transport=transport, weight_folder=str(folder / "weights"))
        make = get_transport(transport).make_publisher
        self.publisher = make(link, named_weights, canary, torch.bfloat16, 0, config)

    def sync(self, version: int) -> tuple[float, float]:
        """Return the seconds until the trainer can continue, and the seconds until the proof."""
        begun = time.monotonic()
        # Without a self-test: the trainer computes in float32 here, and the canary is too short for a self-test
        prove = self.publisher.publish(self.policy, version, self_test=False)
        blocked = time.monotonic() - begun
        prove()
        return blocked, time.monotonic() - begun

    def canary_s(self) -> float:
        """Return the seconds of the trainer's canary. A GPU takes almost no time for it."""
        begun = time.monotonic()
        self.publisher._draft(self.policy, 0)
        return time.monotonic() - begun

    def take_paused(self) -> list[float]:
        return [ray.get(actor.paused.remote(), timeout=60) for actor in self.actors]


def measure(options: argparse.Namespace, folder: Path) -> None:
    from async_grpo.cluster import worker_actors

    async def paused(self: Any) -> float:
        return self._engine.progress()["paused_s"]

    worker_actors.GenerationActor.paused = paused
    engines = Engines(folder, options.vocabulary, options.engines, options.transport)
    size = sum(weight.numel() * 2 for weight in engines.policy.parameters())
    engines.sync(0)
    engines.take_paused()
    print(f"{size / GB:.2f} GB of bfloat16, {options.engines} engines, {os.cpu_count()} cores", flush=True)
    for version in range(1, options.syncs + 1):
        with torch.no_grad():
            for weight in engines.policy.parameters():
                weight.mul_(1.001)
        time.sleep(2)
        copy, canary, found = memcpy_s(size), engines.canary_s(), {}
        with peak_over(held(), found):
            blocked, whole = engines.sync(version)
        pauses = ", ".join(f"{pause:.2f}" for pause in engines.take_paused())
        print(
            f"sync {version}: BLOCKED {blocked - canary:.2f} s (and {canary:.2f} s for the canary), PAUSED {pauses} s",
            f"whole {whole - canary:.2f} s = {(whole - canary) / copy:.1f} x a copy of {copy:.2f} s",
            f"peak {found['peak'] / size:.2f} x the bytes sent",
            sep="; ",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--syncs", type=int, default=3)
    parser.add_argument("--transport", default="object_store", choices=["object_store", "shared_files"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers, options.hidden, options.vocabulary)
        ray.init(
            "local", num_cpus=4, object_store_memory=4 << 30, include_dashboard=False, logging_level="ERROR"
        )
        measure(options, Path(folder))
        ray.shutdown()


if __name__ == "__main__":
    main()
