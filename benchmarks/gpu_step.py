"""Measure one optimizer step of a random Qwen2.5-0.5B in packed bfloat16, and compare it with plain float32.

    python -m benchmarks.gpu_step               # on a GPU
    python -m benchmarks.gpu_step --tiny        # a toy model, also on a CPU: shows that the script works

It prints one JSON object. It says how well the packed bfloat16 gradient agrees with transformers' own float32 forward
of one sequence at a time (cosine and norm ratio), and what a step costs (tokens per second, peak memory).
"""

import json
import time
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.messages import MicroBatch
from async_grpo.modeling import full_tensor, packed
from async_grpo.modeling.policy import PolicyModel
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.batch_tensors import BatchTensors
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks, distributed_run
from async_grpo.training.objective import Objective
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.training.sharding import shard_policy
from async_grpo.types import PROMPT_TOKEN

QWEN_05B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
}
TINY = QWEN_05B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SEED = 0


def main(
    tiny: Annotated[bool, typer.Option(help="A toy model and short sequences.")] = False,
    sequences: Annotated[int, typer.Option(help="Sequences of a step.")] = 64,
    max_length: Annotated[
        int, typer.Option(help="Longest sequence; the shortest has a quarter of it.")
    ] = 2048,
    max_tokens: Annotated[int, typer.Option(help="Token budget of a micro-batch.")] = 36_000,
    steps: Annotated[int, typer.Option(help="Timed steps; one more before them is not timed.")] = 5,
    gradient_checkpointing: Annotated[bool, typer.Option(help="Recompute activations.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    if tiny:
        sequences, max_length, max_tokens = min(sequences, 12), min(max_length, 64), min(max_tokens, 256)
    if max_tokens < max_length:
        raise typer.BadParameter(f"a sequence of {max_length} tokens does not fit --max-tokens {max_tokens}")
    config = Qwen2Config(**(TINY if tiny else QWEN_05B))
    micro_batches = random_step(config.vocab_size, sequences, max_length, max_tokens)
    with distributed_run(device) as ranks:
        objective = Objective(AlgorithmConfig(policy_loss="ppo_clip"))
        expected = reference_gradients(random_model(config).to(ranks.device), micro_batches)
        policy = shard_policy(
            PolicyModel(random_model(config)),
            ranks,
            OptimizerConfig(gradient_checkpointing=gradient_checkpointing),
            "bfloat16",
        )
        accuracy = compare(packed_gradients(policy, objective, micro_batches), expected)
        del expected
        speed = timed_steps(policy, objective, ranks, micro_batches, steps)
        about = {"device": device_name(ranks.device), "attention": attention_name(ranks.device)}
    print(json.dumps(about | accuracy | speed, indent=2))


def random_model(config: Qwen2Config) -> Qwen2ForCausalLM:
    torch.manual_seed(SEED)
    return Qwen2ForCausalLM(config)


def random_step(vocab: int, num_sequences: int, max_length: int, max_tokens: int) -> list[MicroBatch]:
    """Return random sequences, half prompt and half completion, packed in order up to the token budget."""
    rng = np.random.default_rng(SEED)
    micro_batches, lengths = [], []
    for length in [*rng.integers(max_length // 4, max_length + 1, num_sequences).tolist(), None]:
        if length is None or sum(lengths) + length > max_tokens:
            micro_batches.append(random_micro_batch(rng, vocab, lengths))
            lengths = []
        lengths.append(length)
    return micro_batches


def random_micro_batch(rng: np.random.Generator, vocab: int, lengths: list[int]) -> MicroBatch:
    total = sum(lengths)
    loss_mask = np.concatenate([np.arange(length) >= length // 2 for length in lengths])
    # About the log-prob that a random model gives to any token
    near_uniform = -np.log(vocab) + 0.1 * rng.normal(size=total)
    return MicroBatch(
        input_ids=rng.integers(0, vocab, total).astype(np.int32),
        cu_seqlens=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=near_uniform.astype(np.float32),
        advantages=np.repeat(rng.normal(size=len(lengths)), lengths).astype(np.float32),
        versions=np.where(loss_mask, 0, PROMPT_TOKEN).astype(np.int32),
        group_ids=np.zeros(len(lengths), np.int64),
        group_tokens=np.ones(len(lengths), np.int64),
    )


def reference_gradients(model: Qwen2ForCausalLM, micro_batches: list[MicroBatch]) -> dict[str, Tensor]:
    """Return the gradients of the summed clipped loss, in float32, from one unpacked sequence at a time.

    The loss is written out here, so that it does not share code with the library.
    """
    for batch in micro_batches:
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            ids, mask, old, advantages = (
                torch.tensor(values[start:end], device=model.device)
                for values in (batch.input_ids, batch.loss_mask, batch.behaviour_logprobs, batch.advantages)
            )
            ids = ids.long()
            logprobs = -torch.nn.functional.cross_entropy(
                model(ids[None]).logits[0, :-1], ids[1:], reduction="none"
            )
            ratio = (logprobs - old[1:]).exp()
            loss = -torch.minimum(advantages[1:] * ratio, advantages[1:] * ratio.clamp(0.8, 1.28))
            loss[mask[1:]].sum().backward()
    return {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}


def packed_gradients(
    policy: PolicyModel, objective: Objective, micro_batches: list[MicroBatch]
) -> dict[str, Tensor]:
    for batch in micro_batches:
        backward(policy, objective, batch)
    gradients = {name: full_tensor(p.grad).cpu() for name, p in policy.model.named_parameters()}
    policy.zero_grad(set_to_none=True)
    return gradients


def backward(policy: PolicyModel, objective: Objective, batch: MicroBatch) -> None:
    loss, _ = objective(policy, BatchTensors(batch, policy.device))
    loss.backward()


def compare(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return cosine and norm ratio over all weights together, and the cosine of the tensor with the lowest one."""
    product = sum((got[name].double() * expected[name].double()).sum() for name in expected)
    got_norm, expected_norm = (
        torch.stack([tensors[name].double().norm() for name in expected]).norm()
        for tensors in (got, expected)
    )
    cosines = {
        name: torch.nn.functional.cosine_similarity(
            got[name].flatten(), expected[name].flatten(), dim=0
        ).item()
        for name in expected
    }
    worst = min(cosines, key=cosines.get)
    return {
        "gradient_cosine": (product / (got_norm * expected_norm)).item(),
        "gradient_norm_ratio": (got_norm / expected_norm).item(),
        "worst_tensor": worst,
        "worst_tensor_cosine": cosines[worst],
    }


def timed_steps(
    policy: PolicyModel,
    objective: Objective,
    ranks: Ranks,
    micro_batches: list[MicroBatch],
    steps: int,
    optimizer: str = "adamw",
) -> dict[str, Any]:
    config = OptimizerConfig(
        learning_rate=1e-6, lr_scheduler="constant", optimizer=optimizer, update_stats=False
    )
    optimizer, scheduler = build_policy_optimizer(policy, config)
    accumulator = GradientAccumulator(policy, optimizer, scheduler, objective, ranks, config)
    seconds = []
    for _ in range(steps + 1):
        ranks.synchronize()
        begun = time.perf_counter()
        for batch in micro_batches:
            accumulator.add(batch)
        metrics = accumulator.finish()
        ranks.synchronize()
        seconds.append(time.perf_counter() - begun)
    tokens = sum(len(batch.input_ids) for batch in micro_batches)
    median = float(np.median(seconds[1:]))
    return {
        "tokens_per_step": tokens,
        "micro_batches": len(micro_batches),
        "step_seconds_median": median,
        "tokens_per_second": tokens / median,
        "peak_memory_GB": metrics["peak_memory_usage_GB"],
        "mismatch_kl": metrics["mismatch_kl"],
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def attention_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "scaled_dot_product_attention, sequences of about one length at a time"
    return "flash_attn" if packed.flash_attn_varlen_func is not None else "torch varlen_attn"


if __name__ == "__main__":
    typer.run(main)
