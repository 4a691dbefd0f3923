"""Print the table of docs/clusters.md: memory by role for sizes of Qwen2.5, by the formulas of `--dry-run` and `doctor`.

    python -m benchmarks.memory_table

Sizes are in GB (10^9 bytes). No weights are made: the models are on torch's meta device.
"""

import os
import re
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from async_grpo.inference.config import kv_cache_bytes
from async_grpo.launch.local_config import LocalConfig
from async_grpo.launch.plan import limits, roles

TOKENS = 16_384  # tokens of a micro-batch
# name: layers, hidden, intermediate, heads, key-value heads, vocabulary, tied; trainer ranks, engines, GPUs of each
SIZES = {
    "1.5B": (28, 1536, 8960, 12, 2, 151_936, True, 8, 8, 1),
    "7B": (28, 3584, 18_944, 28, 4, 152_064, False, 8, 8, 1),
    "14B": (48, 5120, 13_824, 40, 8, 152_064, False, 16, 8, 2),
    "32B": (64, 5120, 27_648, 40, 8, 152_064, False, 32, 8, 4),
}
COLUMNS = (
    "model",
    "parameters",
    "ranks",
    "a rank",
    "with checkpointing",
    "engines x GPUs",
    "weights of an engine",
    "kB a token in flight",
    "logprob worker",
)
COLUMNS += ("rank 0's machine", "`/dev/shm`")


def qwen2(
    layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> Qwen2Config:
    """Return the configuration of a Qwen2 model of these sizes."""
    return Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


def row(name: str) -> list[str]:
    *sizes, ranks, engines, gpus = SIZES[name]
    shape = qwen2(*sizes)
    with torch.device("meta"):
        total = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(shape).parameters())
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks)))}  # the engines have other GPUs
    with patch.dict(os.environ, devices), tempfile.TemporaryDirectory() as folder:
        shape.save_pretrained(folder)

        def needs(**more: Any) -> dict[str, float]:
            config = LocalConfig(
                model_name_or_path=folder,
                data_path="-",
                reward_fns="-",
                kl_coef=0.001,
                batch_size=128,
                samples_per_question=8,
                max_tokens_per_gpu=TOKENS,
                nproc_per_node=ranks,
                generation_workers=engines,
                tensor_parallel_size=gpus,
                ray_address="joined",
                **more,
            )
            settings = SimpleNamespace(
                dtype="bfloat16", vocab_size=shape.vocab_size, max_total_tokens=0, samples_in_flight=0
            )
            prepared: Any = SimpleNamespace(settings=settings)
            return {role: need for role, _, _, need in roles(config, prepared, total)}

        need, less = needs(), needs(gradient_checkpointing=True)
    (shared,) = [
        re.search(r"less than (.+), Ray", found)[1]
        for _, _, found, _ in limits(2 * total)
        if "Ray uses" in found
    ]
    return [
        *[name, f"{total / 1e9:.2f} 10^9", str(ranks), gb(need["trainer rank"]), gb(less["trainer rank"])],
        *[f"{engines} x {gpus}", gb(need["engine"]), f"{kv_cache_bytes(shape, 2) / 1e3:.1f}"],
        *[gb(need["reference worker"]), gb(need["rank 0's machine"])],
        shared.removesuffix(" GB"),
    ]


def gb(number: float) -> str:
    return f"{number / 1e9:.1f}"


def table() -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(row, SIZES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(table())
