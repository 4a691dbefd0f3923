"""Tiny random Qwen2 models and random micro-batches, for the tests of model, trainer and logprob server."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_grpo.messages import MicroBatch, SharedRunSettings
from async_grpo.modeling.policy import PolicyModel
from async_grpo.options.source_file import library_version

VOCAB = 100
SETTINGS = SharedRunSettings(
    run_name="test",
    model_fingerprint="",
    vocab_size=VOCAB,
    dtype="float32",
    temperature=1.0,
    stop_token_ids=(3,),
    max_total_tokens=64,
    max_completion_tokens=16,
    transport="object_store",
    logprob_roles=(),
    seed=0,
    library=library_version(),
)


def tiny_config(**changes: Any) -> Qwen2Config:
    """Two layers, two heads of 32 that share one key-value head."""
    defaults = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 3,
        "bos_token_id": 1,
        "initializer_range": 0.2,  # far from uniform, so that a wrong token or position shows
    }
    return Qwen2Config(**(defaults | changes))


def tiny_model(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """With random biases and norms too: at their initial 0 and 1 a lost one would not show."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(**changes))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.1)
    return model


def save_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    tiny_model(seed, **changes).save_pretrained(folder)
    return folder


def critic_policy(chunk_tokens: int = 7, **options: Any) -> PolicyModel:
    """A policy whose critic is not at its initial zero: there the trunk would feel no value loss."""
    policy = PolicyModel(tiny_model(), chunk_tokens=chunk_tokens, value_head=True, **options)
    torch.manual_seed(5)
    torch.nn.init.normal_(policy.value_head.weight, std=0.5)
    torch.nn.init.normal_(policy.value_head.bias, std=0.5)
    return policy


def pack(sequences: list[dict[str, Any]]) -> MicroBatch:
    """One micro-batch of whole sequences: `ids`, `mask`, `advantages`, `behaviour`, maybe `ref`, `times`, `versions`, all
    (L,), and `teacher_top` (L, 2, k)."""

    def joined(key: str, dtype: type) -> np.ndarray:
        return np.concatenate([sequence[key] for sequence in sequences]).astype(dtype)

    lengths = [len(sequence["ids"]) for sequence in sequences]
    return MicroBatch(
        input_ids=joined("ids", np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=joined("mask", bool),
        behaviour_logprobs=joined("behaviour", np.float32),
        advantages=joined("advantages", np.float32),
        versions=joined("versions", np.int32)
        if "versions" in sequences[0]
        else np.zeros(sum(lengths), np.int32),
        group_ids=np.array([sequence.get("group", 0) for sequence in sequences], np.int64),
        group_tokens=np.array([sequence.get("group_tokens", 1) for sequence in sequences], np.int64),
        ref_logprobs=joined("ref", np.float32) if "ref" in sequences[0] else None,
        proximal_logprobs=joined("proximal", np.float32) if "proximal" in sequences[0] else None,
        teacher_top=joined("teacher_top", np.float32) if "teacher_top" in sequences[0] else None,
        members=np.array([s["member"] for s in sequences], np.int64) if "times" in sequences[0] else None,
        times=joined("times", np.int32) if "times" in sequences[0] else None,
    )


def random_sequence(
    rng: np.random.Generator, max_length: int = 40, *, with_ref: bool = False
) -> dict[str, Any]:
    """A prompt and a completion. Some are truncated (nothing to train on), some have advantage 0, some several turns
    (masks with holes).

    Masked positions hold NaN: whatever is read there shows.
    """
    length = int(rng.integers(2, max_length))
    mask = np.arange(length) >= rng.integers(1, length)
    if rng.random() < 0.2:
        mask[:] = False
    if rng.random() < 0.4:
        mask &= rng.random(length) < 0.6  # an environment's words between those of the policy
    advantage = 0.0 if rng.random() < 0.2 else rng.normal()
    columns = {"advantages": np.full(length, advantage), "behaviour": rng.normal(-3.0, 1.5, length)}
    if with_ref:
        columns["ref"] = rng.normal(-3.0, 1.5, length)
    masked = {name: np.where(mask, values, np.nan) for name, values in columns.items()}
    return {"ids": rng.integers(0, VOCAB, length), "mask": mask, **masked}
