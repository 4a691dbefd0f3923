"""Measure the memory that a rank needs to load its shard of a model, compared with loading a tiny model.

    python -m benchmarks.loading                     # 1 GB of random weights in bfloat16 over 4 ranks, a minute

Each rank should need its shard, one tensor, and little more. With `--whole`, each rank loads the whole model, as it
must if the files have other names for the weights.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_grpo.launch.process_variables import free_port

RANK = """
import resource, sys
from pathlib import Path
from async_grpo.cluster import policy_kinds
from async_grpo.config.run import RunConfig
from async_grpo.modeling import local_shard
from async_grpo.training import sharding
from async_grpo.training.distributed import distributed_run
from async_grpo.messages import SharedRunSettings
folder, whole = sys.argv[1], sys.argv[2] == "whole"
settings = SharedRunSettings("x", "", 100, "float32", 1.0, (3,), 64, 16, "object_store", (), 0)
with distributed_run("cpu", timeout_s=300) as ranks:
    if whole:
        sharding.weight_names = lambda path: ()
    config = RunConfig(model_name_or_path=folder, data_path="x", reward_fns="format")
    policy = policy_kinds.load_language_policy(config, settings, ranks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shard = sum(local_shard(parameter).nbytes for parameter in policy.parameters())
    Path(sys.argv[3], f"{ranks.rank}").write_text(f"{peak} {shard}")
import os; os._exit(0)
"""
MB = 2**20


def make_model(folder: Path, layers: int, hidden: int, vocabulary: int) -> int:
    """Write a random Qwen2 in bfloat16, and return the bytes of its largest tensor in float32, the dtype of the ranks."""
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 1, "max_position_embeddings": 512}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, tie_word_embeddings=True, **shape, **heads))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")
    return 4 * max(parameter.numel() for parameter in model.parameters())


def measure(folder: Path, ranks: int, how: str) -> list[tuple[int, int]]:
    """Return (peak, shard) of each rank, in bytes."""
    with tempfile.TemporaryDirectory() as out:
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
        torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "--no-python"]
        command = [*torchrun, sys.executable, "-c", RANK, str(folder), how, out]
        subprocess.run(command, check=True, timeout=500, stderr=subprocess.DEVNULL)
        told = [(Path(out) / str(rank)).read_text().split() for rank in range(ranks)]
    return [(int(peak), int(shard)) for peak, shard in told]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    how = "whole" if given.whole else "shards"
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        small, large = Path(scratch) / "small", Path(scratch) / "large"
        make_model(small, 1, 64, 100)
        tensor = make_model(large, 12, 1536, 64_000)
        size = sum(file.stat().st_size for file in large.glob("*.safetensors"))
        base = max(peak for peak, _ in measure(small, given.ranks, how))
        print(
            f"{size / MB:.0f} MB over {given.ranks} ranks, read {how}; its largest tensor has {tensor / MB:.0f} MB"
        )
        for rank, (peak, shard) in enumerate(measure(large, given.ranks, how)):
            over = peak - base - shard - tensor
            peak, more, shard = (f"{count / MB:.0f} MB" for count in (peak, peak - base, shard))
            print(
                f"rank {rank}: peak {peak}, {more} over a tiny model's; shard {shard}; {over / MB:.0f} MB beyond"
            )


if __name__ == "__main__":
    main()
