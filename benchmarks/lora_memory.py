"""Print the table of docs/lora.md: sizes of Qwen2.5 that train on one shared GPU, by the formulas of `--dry-run`.

    python -m benchmarks.lora_memory

Sizes are in GB (10^9 bytes). No weights are made: the models are on torch's meta device.
"""

import os
import tempfile
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from async_grpo.config.lora import with_four_bits
from async_grpo.inference.config import kv_cache_bytes
from async_grpo.launch.local_config import CONTEXTS_SHARE, LocalConfig
from async_grpo.launch.plan import roles
from async_grpo.messages import LoraSettings
from async_grpo.modeling.lora import linear_layers
from benchmarks.memory_table import qwen2

RANK = 16
MICRO_BATCH_TOKENS = 4096
CACHED_TOKENS = 32 * 2048  # tokens in the KV cache: 32 sequences of 2,048 tokens at once
CARDS_GB = (16, 24, 48, 80)
# name -> layers, hidden size, intermediate size, heads, key-value heads, vocabulary, whether embeddings are tied
SIZES = {
    "0.5B": (24, 896, 4864, 14, 2, 151_936, True),
    "1.5B": (28, 1536, 8960, 12, 2, 151_936, True),
    "3B": (36, 2048, 11_008, 16, 2, 151_936, True),
    "7B": (28, 3584, 18_944, 28, 4, 152_064, False),
    "14B": (48, 5120, 13_824, 40, 8, 152_064, False),
}
COLUMNS = (
    "model",
    "adapter",
    "trainer, all weights",
    "trainer, LoRA",
    "engine",
    "together, LoRA",
    "smallest GPU",
    "trainer, base in 4 bits",
    "together, 4 bits",
    "smallest GPU, 4 bits",
)


def row(name: str) -> list[str]:
    """Return the cells of a size: parameters of the adapter, memory of trainer and engine, and the GPU that they fit."""
    shape = qwen2(*SIZES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    num_parameters = sum(weight.numel() for weight in model.parameters())
    names = linear_layers(model)
    num_trained = sum(RANK * sum(model.get_submodule(layer).weight.shape) for layer in names)
    lora = LoraSettings(rank=RANK, scaling=2.0, layers=tuple(names))
    in_four_bits = with_four_bits(model, lora)
    full_gb = trainer_gb(shape, num_parameters, None, lora=None)
    lora_gb = trainer_gb(shape, num_parameters, num_trained, lora=lora)
    engine_gb = (2 * num_parameters + CACHED_TOKENS * kv_cache_bytes(shape, 2)) / 1e9
    four_bit_gb = trainer_gb(shape, num_parameters, num_trained, lora=in_four_bits)
    return [
        name,
        f"{num_trained / 1e6:.1f} M",
        f"{full_gb:.1f}",
        f"{lora_gb:.1f}",
        f"{engine_gb:.1f}",
        f"{lora_gb + engine_gb:.1f}",
        smallest_card(lora_gb + engine_gb),
        f"{four_bit_gb:.1f}",
        f"{four_bit_gb + engine_gb:.1f}",
        smallest_card(four_bit_gb + engine_gb),
    ]


def smallest_card(needed_gb: float) -> str:
    """Return the size of the smallest GPU that fits trainer and engine together."""
    fitting = [f"{card} GB" for card in CARDS_GB if needed_gb < (1 - CONTEXTS_SHARE) * card]
    return fitting[0] if fitting else "larger"


def trainer_gb(
    shape: Qwen2Config, num_parameters: int, num_trained: int | None, lora: LoraSettings | None
) -> float:
    """Return the memory in GB of a trainer on one GPU, with gradient checkpointing."""
    settings = SimpleNamespace(
        dtype="bfloat16", vocab_size=shape.vocab_size, max_total_tokens=0, samples_in_flight=0, lora=lora
    )
    prepared: Any = SimpleNamespace(settings=settings)
    with (
        patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "0"}),
        tempfile.TemporaryDirectory() as folder,
    ):
        shape.save_pretrained(folder)
        config = LocalConfig(
            model_name_or_path=folder,
            data_path="-",
            reward_fns="-",
            max_tokens_per_gpu=MICRO_BATCH_TOKENS,
            nproc_per_node=1,
            gradient_checkpointing=True,
            update_stats=False,
            ray_address="joined",
        )
        needs = {
            name: num_bytes for name, _, _, num_bytes in roles(config, prepared, num_parameters, num_trained)
        }
    return needs["trainer rank"] / 1e9


def table() -> str:
    """Return the table in Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *map(row, SIZES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(table())
