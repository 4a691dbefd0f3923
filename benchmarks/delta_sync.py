"""Measure the bytes that `--weight-sync-deltas` sends and its time, for GRPO at several learning rates.

    python -m benchmarks.delta_sync        # SmolLM2-135M-Instruct, 4 steps at each of 1e-7, 1e-6, 1e-5 and 1e-4: minutes
    python -m benchmarks.delta_sync --model sample-data/tiny-model --learning-rates 1e-6 --steps 100
    python -m benchmarks.delta_sync --learning-rates 1e-6 --steps 100 --sample-every 10
    python -m benchmarks.delta_sync --learning-rates 2e-5 --steps 20 --lora-rank 16 --dtype float32

With --lora-rank, an adapter of all linear layers is trained and sent alone, as with `--lora-sync adapter`.

The policy is trained in float32 with the library's optimizer at its defaults, without warm-up. New completions are
sampled every `--sample-every` steps. A completion's reward is the fraction of its characters that are an "e". After
each step the weights go, in --dtype, through a publisher to a worker without an engine, which applies the changes and
compares every tensor with the trainer's, bit by bit.

It prints bytes and processor seconds for each learning rate, as means over the steps. ENCODE is the time to compare and
encode on rank 0. APPLY is the time to make the whole weights in the worker. COPY is the time of a copy of the whole
weights in memory, for comparison: no network is faster. PAYS BELOW is the speed of a network on which the saved bytes
take as long as ENCODE and APPLY.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from async_grpo.data.smollm2 import cached_smollm2
from async_grpo.messages import LoraSettings
from async_grpo.modeling.load import load_causal_lm, torch_dtype
from async_grpo.modeling.lora import add_lora, fill_lora, linear_layers
from async_grpo.modeling.policy import PolicyModel, named_adapters, named_full_tensors, named_weights
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.optimizer import build_policy_optimizer
from async_grpo.weights import sent_chunks
from async_grpo.weights.canary import Canary
from async_grpo.weights.config import WeightConfig
from async_grpo.weights.package import unpack
from async_grpo.weights.publisher import Publisher
from async_grpo.weights.received_chunks import ReceivedChunks

PROMPT = "The capital of France is Paris. The capital of Germany is Berlin. Mathematics is the study of"
GROUP_SIZE = 4
COMPLETION_TOKENS = 16
LORA_ALPHA = 32.0  # default of --lora-alpha
MB = 1e6


class Worker:
    """The `Engines` interface of one worker, which keeps the weights and has no engine."""

    def __init__(self) -> None:
        self.received = ReceivedChunks()
        self.tensors: dict[str, torch.Tensor] = {}
        self.apply_s = 0.0

    def put(self, chunk: np.ndarray) -> np.ndarray:
        return chunk

    def deliver(self, package: Any) -> dict[str, Any]:
        begun = time.thread_time()
        chunks = self.received.restore([chunk.data for chunk in package.chunks], package.chunk_digests)
        self.apply_s += time.thread_time() - begun
        self.tensors, manifest = unpack(chunks)
        return {"worker": (manifest, package.canary_logprobs)}

    def commit(self, package: Any, landed: list[str]) -> None:
        assert landed == ["worker"]


class Trainer:
    """A model that is trained by GRPO on groups of one prompt."""

    def __init__(self, folder: Path, learning_rate: float, lora_rank: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = load_causal_lm(folder, "float32")
        trained_model = load_causal_lm(folder, "float32")
        if lora_rank:
            layers = tuple(linear_layers(trained_model))
            lora = LoraSettings(lora_rank, LORA_ALPHA / lora_rank, layers, "adapter")
            add_lora(trained_model, lora)
            fill_lora(trained_model, lora, seed=0, device=torch.device("cpu"))
        self.policy = PolicyModel(trained_model)
        config = OptimizerConfig(learning_rate=learning_rate, num_warmup_steps=0)
        self.max_norm = config.max_grad_norm
        self.optimizer, self.schedule = build_policy_optimizer(self.policy, config)
        self.prompt = self.tokenizer(PROMPT, return_tensors="pt").input_ids

    @torch.no_grad()
    def sample(self) -> None:
        """Sample a group of completions with the current weights, and compute their advantages."""
        weights = dict(named_full_tensors(self.policy))
        # Tied weights are stored under only one of their names
        self.model.load_state_dict(weights, strict=False)
        self.sequences = self.model.generate(
            self.prompt.repeat(GROUP_SIZE, 1),
            do_sample=True,
            max_new_tokens=COMPLETION_TOKENS,
            min_new_tokens=COMPLETION_TOKENS,
        )
        texts = self.tokenizer.batch_decode(self.sequences[:, self.prompt.shape[1] :])
        rewards = torch.tensor([text.count("e") / max(1, len(text)) for text in texts])
        self.advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def step(self) -> None:
        """Take one optimizer step on the group."""
        length = self.sequences.shape[1]
        boundaries = torch.arange(0, GROUP_SIZE * length + 1, length, dtype=torch.int32)
        is_completion = torch.zeros_like(self.sequences, dtype=torch.bool)
        is_completion[:, self.prompt.shape[1] :] = True
        logprobs, *_ = self.policy(self.sequences.flatten(), boundaries, is_completion.flatten(), 1.0)
        loss = -(self.advantages[:, None] * logprobs.view(GROUP_SIZE, length)).sum() / is_completion.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def copy_s(num_bytes: int) -> float:
    """Return the seconds that a copy of this number of bytes in memory takes."""
    source = np.ones(num_bytes, np.uint8)
    target = np.zeros(num_bytes, np.uint8)
    begun = time.thread_time()
    target[:] = source
    return time.thread_time() - begun


def measure(folder: Path, learning_rate: float, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    steps = options.steps
    dtype = torch_dtype(options.dtype)
    words = torch.int16 if dtype is torch.bfloat16 else torch.int32
    trainer = Trainer(folder, learning_rate, options.lora_rank)
    model_bytes = sum(weight.numel() for _, weight in named_weights(trainer.policy)) * dtype.itemsize
    named = named_adapters if options.lora_rank else named_weights
    worker = Worker()
    # Use a trivial canary, because it is not measured here, and a real one takes a second on a CPU
    canary = Canary([Canary.text(1000, 4)], lambda model, *texts: np.zeros(4, np.float32))
    config = WeightConfig(weight_sync_deltas=True, canary_tolerance=1.0)
    publisher = Publisher(worker, named, canary, dtype, 0, config)
    encode_s = 0.0
    encode = sent_chunks.encode_changes

    def timed_encode(*arrays: np.ndarray, compress: bool) -> Any:
        nonlocal encode_s
        begun = time.thread_time()
        changes = encode(*arrays, compress=compress)
        encode_s += time.thread_time() - begun
        return changes

    sent_chunks.encode_changes = timed_encode
    whole_bytes = publisher.publish(trainer.policy, 0)()["weight_sync_bytes"]
    worker.apply_s = 0.0
    sizes, shares = [], []
    for step in range(steps):
        if step % options.sample_every == 0:
            trainer.sample()
        trainer.step()
        metrics = publisher.publish(trainer.policy, step + 1)()
        sizes.append(metrics["weight_sync_bytes"])
        shares.append(metrics["weight_sync_changed_share"])
        for name, weight in named(trainer.policy):
            expected = weight.detach().to(dtype).view(words)
            assert torch.equal(worker.tensors[name].view(words), expected), name
    sent_chunks.encode_changes = encode
    saved_bytes = whole_bytes - np.mean(sizes)
    print(
        f"lr {learning_rate:g}, {steps} steps: {100 * np.mean(shares):.2f} % of the values changed (at most "
        f"{100 * max(shares):.2f} %); {np.mean(sizes) / MB:.2f} of {whole_bytes / MB:.1f} MB = "
        f"{100 * np.mean(sizes) / whole_bytes:.2f} % (at most {100 * max(sizes) / whole_bytes:.2f} %), "
        f"{100 * np.mean(sizes) / model_bytes:.2f} % (at most {100 * max(sizes) / model_bytes:.2f} %) of the model, "
        f"{100 * sizes[0] / model_bytes:.2f} % after the first step; ENCODE "
        f"{encode_s / steps:.3f} s, APPLY {worker.apply_s / steps:.3f} s, COPY {copy_s(int(whole_bytes)):.3f} s; "
        f"PAYS BELOW {8 * saved_bytes / MB / ((encode_s + worker.apply_s) / steps):.0f} Mbit/s; "
        "all weights bit-identical after each step",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of the model; by default SmolLM2-135M-Instruct")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-7, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--sample-every", type=int, default=2)
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="engines' dtype")
    options = parser.parse_args()
    folder = options.model or cached_smollm2()
    print(f"{folder.name}, {os.cpu_count()} cores", flush=True)
    for learning_rate in options.learning_rates:
        measure(folder, learning_rate, options)


if __name__ == "__main__":
    main()
