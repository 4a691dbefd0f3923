"""What a base in 4 bits changes: the weights, and the log-probs of engines that have its values, or keep their own base.

    python -m benchmarks.four_bit_base [--model FOLDER] [--dtype float32] [--texts 16] [--tokens 128]

The policy is a rank's own, with the base in 4 bits and an adapter whose B is noise. Two engines compute the log-probs of
the same texts, sampled from the base, by transformers' own forward. One has the weights that a sync sends. The other has
the original base with the same adapter, as if engines kept their own base.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from async_grpo.cluster.policy_kinds import load_language_policy
from async_grpo.config.lora import lora_settings
from async_grpo.config.run import RunConfig
from async_grpo.data import smollm2
from async_grpo.messages import SharedRunSettings
from async_grpo.modeling import MergedWeight, full_tensor, local_shard, stored_weight
from async_grpo.modeling.four_bit import FourBitWeight
from async_grpo.modeling.load import load_config, torch_dtype
from async_grpo.modeling.lora import named_lora_tensors
from async_grpo.modeling.policy import PolicyModel, named_weights
from async_grpo.training.distributed import distributed_run
from async_grpo.training.sharding import canary_logprobs

RANK = 16
SIZE_OF_B = 0.003  # standard deviation of the adapter's B, after some hundred steps of the usual size


def made_policy(model: str, dtype: str, ranks: Any) -> PolicyModel:
    """Return the policy of a rank, with a base in 4 bits and an adapter that changes the log-probs."""
    config = RunConfig(
        model_name_or_path=model, data_path="x", reward_fns="format", lora_rank=RANK, load_in_4bit=True
    )
    vocab_size = load_config(model).get_text_config().vocab_size
    settings = SharedRunSettings("x", "", vocab_size, dtype, 1.0, (3,), 256, 256, "object_store", (), 0)
    settings = dataclasses.replace(settings, lora=lora_settings(config, model))
    policy = load_language_policy(config, settings, ranks)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in named_lora_tensors(policy.model):
            if ".lora_B" in name:
                local_shard(tensor).normal_(0, SIZE_OF_B)
    return policy


@torch.no_grad()
def engine_logprobs(model: Any, texts: list[np.ndarray]) -> np.ndarray:
    """Return the log-probs of the texts' tokens after the first, by transformers' own forward, end to end."""
    logprobs = []
    for text in texts:
        ids = torch.tensor(text, dtype=torch.int64)
        logits = model(ids[None], use_cache=False).logits[0].float()
        logprobs.append(logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy())
    return np.concatenate(logprobs)


def weights_of_engines(policy: PolicyModel, original: Any) -> tuple[dict, dict, float]:
    """Return the weights that a sync sends, those of the original base with the adapter, and the error of 4 bits.

    The error is the norm of the difference, divided by the norm of the weights that are stored in 4 bits.
    """
    sent_weights = {}
    kept_weights = {}
    squares = 0.0
    squared_errors = 0.0
    originals = original.state_dict()
    for name, weight in named_weights(policy):
        sent_weights[name] = full_tensor(weight).detach().clone()
        base = stored_weight(weight)
        kept_weights[name] = originals[name]
        if isinstance(base, FourBitWeight):
            error = full_tensor(base).float() - originals[name].float()
            squared_errors += float(error.square().sum())
            squares += float(originals[name].float().square().sum())
        if isinstance(weight, MergedWeight):
            kept_weights[name] = full_tensor(dataclasses.replace(weight, base=originals[name]))
    return sent_weights, kept_weights, (squared_errors / squares) ** 0.5


def compare(name: str, trainer: np.ndarray, engine: np.ndarray) -> None:
    """Print the differences of log-probs, and the KL from the engine to the trainer by its k3 estimator."""
    ratio = trainer.astype(np.float64) - engine
    kl = float(np.mean(np.expm1(ratio) - ratio))
    print(f"{name:<28} mean {np.abs(ratio).mean():.2e}  largest {np.abs(ratio).max():.2e}  KL {kl:.2e}")


def main() -> None:
    """Compare both engines with the trainer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=smollm2.cache_folder())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    model = str(args.model)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch_dtype(args.dtype)).eval()
    torch.manual_seed(0)
    first = torch.randint(5, original.config.vocab_size, (args.texts, 1))
    samples = original.generate(
        first, do_sample=True, top_k=0, top_p=1.0, min_new_tokens=args.tokens, max_new_tokens=args.tokens
    )
    texts = [text.numpy() for text in samples]
    with distributed_run("cpu", timeout_s=300) as ranks:
        policy = made_policy(model, args.dtype, ranks)
        logprobs = canary_logprobs(policy, *texts).reshape(len(texts), -1)[:, 1:].flatten()
        sent_weights, kept_weights, error = weights_of_engines(policy, original)
        print(f"weights in 4 bits differ from the original by {error:.3f} of their norm")
        original.load_state_dict(sent_weights, strict=False)
        compare("engine with sent weights", logprobs, engine_logprobs(original, texts))
        original.load_state_dict(kept_weights, strict=False)
        compare("engine with its own base", logprobs, engine_logprobs(original, texts))


if __name__ == "__main__":
    main()
