"""Is the proof of landing sharp in bfloat16? On the real engine, with random models of several shapes.

    python -m benchmarks.landing_proof                        # all shapes, about half an hour on two cores
    python -m benchmarks.landing_proof --shape 2x3584 --repetitions 5

For each shape: healthy engines that the self-test accepts, with fresh weights each time; each tensor lost in turn in its
round of the self-test, seen by the canary (how many times what is allowed) and by the read-back (named or not); after
steps of 1e-6, an engine that receives and does not apply, and one whose tied head stays behind: refused at which sync?
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "real")]
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])

# layers x hidden size; the last: with channels that are 50 times larger than the others, as trained models have
SHAPES = {"12x1536": (12, 1536), "28x512": (28, 512), "2x3584": (2, 3584), "12x1536-outliers": (12, 1536)}
OUTLIERS, VOCABULARY, STEP = 4, 2048, 1e-6


def make_model(folder: Path, shape: str) -> None:
    """A random Qwen2 with a tied head in bfloat16; its tokenizer is the sample model's."""
    layers, hidden = SHAPES[shape]
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": 2 if hidden % 256 == 0 else 4}
    if heads["num_attention_heads"] % heads["num_key_value_heads"]:
        heads["num_key_value_heads"] = 4
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": layers}
    more = {"max_position_embeddings": 1024, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **more))
    renew(model, shape, seed=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "sample-data" / "tiny-model").save_pretrained(folder)


@torch.no_grad()
def renew(model: torch.nn.Module, shape: str, seed: int) -> None:
    """Fresh random weights, of the sizes that trained ones have."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        fresh = torch.randn(weight.shape, generator=generator) * (0.02 if weight.ndim > 1 else 0.1)
        weight.copy_(fresh + ("norm" in name))
    if shape.endswith("outliers"):
        channels = torch.randperm(SHAPES[shape][1], generator=generator)[:OUTLIERS]
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight[channels] *= 50  # they write large values into a few channels of the residual stream
            elif "norm.weight" in name and "layernorm" in name:
                weight[channels] *= 0.1  # which the norms then damp


class Proof:
    """One engine, and a publisher whose engine's losses are planted. A link of the kind that `Publisher` asks."""

    def __init__(self, engine: Any, folder: Path, shape: str) -> None:
        from async_grpo.modeling.load import load_causal_lm
        from async_grpo.modeling.policy import PolicyModel, named_weights
        from async_grpo.training.sharding import canary_logprobs
        from async_grpo.weights.config import WeightConfig
        from async_grpo.weights.publisher import Canary, Publisher
        from async_grpo.weights.self_test import self_test_groups

        self.engine, self.shape, self.version = engine, shape, 0
        self.masters = load_causal_lm(folder, "float32")
        # The trainer computes in bfloat16, as FSDP does with float32 masters
        self.policy = PolicyModel(load_causal_lm(folder, "bfloat16"))
        self.groups = self_test_groups([name for name, _ in named_weights(self.policy)])
        self.watch, self.seen, self.rounds = False, {}, 0
        canary = Canary.random(canary_logprobs, VOCABULARY, 512, seed=0)
        self._make = lambda: Publisher(self, named_weights, canary, torch.bfloat16, 0, WeightConfig())
        self.publisher, self.worst = self._make(), 0.0

    def lose(self, *names: str) -> None:
        self.engine.run(self.engine.worker.engine.collective_rpc("lose", args=(names,)))

    def put(self, chunk: np.ndarray) -> np.ndarray:
        return chunk

    def deliver(self, package: Any) -> dict[str, Any]:
        from async_grpo.weights.package import SELF_TEST, rms

        receipt = self._receipt(package)
        is_round = package.version == SELF_TEST and package.manifest.keys() != self.everything
        if is_round:
            self.worst = max(self.worst, rms(receipt[1] - package.canary_logprobs) / package.tolerance)
        if is_round and self.watch:
            for name in self.groups[self.rounds] & package.manifest.keys():
                # Put the weights before the round back, then lose one of those that it changes
                self._send(self.before)
                self.lose(name)
                manifest, logprobs = self._receipt(package)
                self.lose()
                missed = rms(logprobs - package.canary_logprobs) / package.tolerance
                self.seen[name] = missed, not manifest[name].in_use
            self._receipt(package)
        self.rounds += is_round
        return {"g0": receipt}

    def _receipt(self, package: Any) -> Any:
        from async_grpo.protocols import answer_canary

        worker, chunks = self.engine.worker, [memoryview(chunk) for chunk in package.chunks]
        manifest = self.engine.run(worker.update(package.version, chunks), 300)
        return manifest, self.engine.run(answer_canary(worker, package.canary_texts), 300)

    def _send(self, chunks: list[np.ndarray]) -> None:
        self.engine.run(self.engine.worker.update(-2, [memoryview(chunk) for chunk in chunks]), 300)

    def commit(self, package: Any, landed: list[str]) -> None:
        pass

    def abort(self, error: BaseException) -> None:
        pass

    def start(self, seed: int, watch: bool = False) -> None:
        """The self-test, and the sync at start, of fresh weights."""
        from async_grpo.weights.package import pack

        renew(self.masters, self.shape, seed)
        self._cast()
        weights = dict(self.policy.model.named_parameters())
        self.everything, self.rounds, self.watch = weights.keys(), 0, watch
        self.before = [pack(weights, torch.bfloat16)[0]] if watch else []
        self.publisher, self.version = self._make(), 0
        self.publisher.publish(self.policy, 0, self_test=True)()

    def step(self, generator: torch.Generator) -> None:
        """An update of AdamW's size at its start, and its sync."""
        with torch.no_grad():
            for weight in self.masters.parameters():
                weight.add_(STEP * torch.randn(weight.shape, generator=generator).sign())
        self._cast()
        self.version += 1
        self.publisher.publish(self.policy, self.version)()

    @torch.no_grad()
    def _cast(self) -> None:
        for ours, master in zip(self.policy.model.parameters(), self.masters.parameters(), strict=True):
            ours.copy_(master)


def measure(shape: str, repetitions: int) -> None:
    from test_generation_real import EngineThread

    from async_grpo.errors import AsyncGrpoError

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), shape)
        more = {"dtype": "bfloat16", "max_total_tokens": 520, "vocab_size": VOCABULARY}
        with closing(EngineThread(Path(folder), "lossy_extension.Lossy", **more)) as engine:
            proof, begun, accepted = Proof(engine, Path(folder), shape), time.monotonic(), 0
            for seed in range(repetitions):
                try:
                    proof.start(seed)
                    accepted += 1
                except AsyncGrpoError as error:
                    print(f"{shape}: healthy engine refused: {error}")
            rounding = proof.publisher._rounding
            print(
                f"{shape}: healthy accepted {accepted} of {repetitions}, at most {proof.worst:.2f} of what is allowed in "
                f"a round; unchanged weights differ by {rounding:.2g}; {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            proof.start(0, watch=True)
            least, name = min((missed, name) for name, (missed, _) in proof.seen.items())
            unseen = [name for name, (missed, named) in proof.seen.items() if missed <= 1 and not named]
            named = sum(named for _, named in proof.seen.values())
            print(
                f"{shape}: {len(proof.seen)} tensors lost in turn: the canary misses by at least {least:.1f} of what is "
                f"allowed ({name}); the read-back names {named}; seen by neither: {unseen or 'none'}",
                flush=True,
            )
            for fault in ("everything", "tied head", ""):
                refused_at, generator = [], torch.Generator().manual_seed(1)
                proof.start(1)
                proof.lose(fault)
                for _ in range(repetitions):
                    for sync in (1, 2, 3):
                        try:
                            proof.step(generator)
                        except AsyncGrpoError:
                            refused_at.append(sync)
                            break
                    if fault:  # back to a healthy engine
                        proof.lose()
                        proof.publisher._proof = dict
                        proof.step(generator)
                        proof.lose(fault)
                what = f"loses {fault}" if fault else "healthy"
                print(
                    f"{shape}: steps of {STEP:g}, {what}: refused in {len(refused_at)} of {repetitions}",
                    refused_at,
                    flush=True,
                )
                proof.lose()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--repetitions", type=int, default=20)
    options = parser.parse_args()
    for shape in options.shape or SHAPES:
        measure(shape, options.repetitions)


if __name__ == "__main__":
    main()
