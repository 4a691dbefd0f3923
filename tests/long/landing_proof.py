"""Is the proof of landing sharp, and does it leave healthy engines alone? On the real engine.

    python -m tests.long.landing_proof                        # all models, an hour on two cores
    python -m tests.long.landing_proof --model 2x3584 --repetitions 5
    python -m tests.long.landing_proof --model smollm2 --dtype float32 --part healthy

The program ends with status 1 if a healthy engine is refused, or a lost tensor is not. `--every 16` loses each 16th tensor
only. `tests/real/test_landing_proof_real.py` runs it so.

Models are random ones of several shapes, in bfloat16, and a real one, SmolLM2-135M-Instruct (`async_grpo.data.smollm2`), in
both dtypes. The parts, for each:

- healthy: engines that the self-test accepts, with fresh weights each time (the real model: with fresh canary texts);
- lost: each tensor lost in turn in the round of the self-test that changes it; named by the read-back or not, and how many
  times what is allowed the canary misses (`--canary-every N`: of each Nth tensor, as it takes longest; 0: of none). In
  float32 the changed weights are the first that an engine receives, so there the canary alone must refuse each of them;
- steps: after steps of 1e-6, an engine that receives and does not apply, and one whose tied head stays behind: refused at
  which sync?
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from async_grpo.weights.read_back import place_of

ROOT = Path(__file__).resolve().parents[2]
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])

# layers x hidden size; the last: with channels that are 50 times larger than the others, as trained models have
SHAPES = {"12x1536": (12, 1536), "28x512": (28, 512), "2x3584": (2, 3584), "12x1536-outliers": (12, 1536)}
OUTLIERS, VOCABULARY, STEP = 4, 2048, 1e-6
REAL = "smollm2"
PARTS = ("healthy", "lost", "steps")


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


def multiply_bfloat16_as_float32() -> None:
    """Let torch's linear layers multiply bfloat16 as float32 and round once, as processors with bfloat16 products do.

    Without such instructions torch takes six times longer for the products than in float32.
    """
    linear = functional.linear

    def rounded_once(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if inputs.dtype is not torch.bfloat16:
            return linear(inputs, weight, bias)
        wide_bias = None if bias is None else bias.float()
        return linear(inputs.float(), weight.float(), wide_bias).bfloat16()

    functional.linear = rounded_once


def by_turns(names: Iterable[str]) -> list[str]:
    """Order `names` so that neighbors are compared in different places (`place_of`)."""
    numbers: dict[str, int] = {}  # of names seen, by place
    turns: dict[str, int] = {}
    for name in names:
        turns[name] = numbers[place_of(name)] = numbers.get(place_of(name), 0) + 1
    return sorted(turns, key=lambda name: turns[name])


class Proof:
    """One engine, and a publisher whose engine's losses are planted. A link of the kind that `Publisher` asks."""

    def __init__(self, engine: Any, folder: Path, options: argparse.Namespace, model: str, vocabulary: int):
        from async_grpo.modeling.load import load_causal_lm, torch_dtype
        from async_grpo.modeling.policy import PolicyModel

        self.engine, self.model, self.options = engine, model, options
        self.vocabulary = vocabulary
        self.wire_dtype = torch_dtype(options.dtype)
        self.masters = load_causal_lm(folder, "float32")
        # The trainer computes in the wire's dtype, as FSDP does with float32 masters
        self.policy = PolicyModel(load_causal_lm(folder, options.dtype))
        self.version = self.self_tests_delivered = 0
        self.loaded: tuple[Any, Any] | None = (
            None  # manifest of the weights that the engine holds, and its answer
        )
        self.watch = False
        self.named: dict[str, bool] = {}  # lost tensor -> whether the read-back names it
        self.missed: dict[
            str, float
        ] = {}  # lost tensor -> by how many times what is allowed the canary misses
        self.worst = 0.0  # of healthy engines, the same
        self.start_s: list[float] = []  # CPU seconds of this process for each self-test and the sync after it
        self.start_wall_s: list[float] = []  # seconds of each self-test and the sync after it
        self.sync_wall_s: list[float] = []  # seconds of each sync alone

    def lose(self, *names: str) -> None:
        """Let the engine lose these tensors from now on."""
        self.loaded = None
        self.engine.run(self.engine.worker.engine.collective_rpc("lose", args=(names,)))

    def put(self, chunk: np.ndarray) -> np.ndarray:
        """Return the chunk: it is in memory already."""
        return chunk

    def deliver(self, package: Any) -> dict[str, Any]:
        """Load the package into the engine; in a watched round, lose each of its tensors in turn as well."""
        from async_grpo.weights.package import SELF_TEST

        if not package.chunks:
            # The trainer asks whether the engine has its weights already, as `WorkerActor.update_weights` is asked
            return {"g0": ({}, self._canary(package))}
        is_self_test = package.version == SELF_TEST
        self.self_tests_delivered += is_self_test
        sends_unchanged_first = self.wire_dtype is not torch.float32
        is_round = is_self_test and self.self_tests_delivered > sends_unchanged_first
        changed = self._tensors(package) if is_round and self.watch else {}
        if changed:
            self._read_back_lost(changed)
        receipt = self._receipt(package)
        if is_round:
            self.worst = max(self.worst, self._miss(package, receipt[1]))
        if changed:
            self._answer_lost(package, changed)
        return {"g0": receipt}

    def _read_back_lost(self, changed: dict[str, torch.Tensor]) -> None:
        """Lose each tensor in turn: the engine holds the unchanged weights, and goes on to.

        Tensors that are compared in one place are never lost at once, or the one would be named for the other.
        """
        lost: dict[str, torch.Tensor] = {}  # since the places were last in order
        if self.wire_dtype is torch.float32:
            # This self-test has sent no unchanged weights. Without them, each place would count as one that cannot be read
            self._send(self.before)
        for number, name in enumerate(by_turns(changed)[:: self.options.every]):
            if place_of(name) in map(place_of, lost):
                self._send(lost)  # the values that the engine has kept
                lost = {}
            self.lose(name)
            manifest = self._send({name: changed[name]})
            self.named[name] = not manifest[name].in_use
            lost[name] = self.before[name]
            if number % 32 == 0:
                print(f"  {number} of {len(changed)} tensors lost in turn", flush=True)
        self.lose()

    def _answer_lost(self, package: Any, changed: dict[str, torch.Tensor]) -> None:
        """Ask the canary of an engine that holds all changed weights but one, which is unchanged.

        An answer that is no number stays in vLLM's cache: zero attention to it is no number either. So it is the last.
        """
        every = self.options.canary_every
        names = by_turns(changed)[:: self.options.every]
        for number, name in enumerate(names[::every] if every else []):
            if number % 32 == 0:
                print(f"  {number} of {len(names)} lost tensors shown to the canary", flush=True)
            self._send({name: self.before[name]})
            self.missed[name] = self._miss(package, self._canary(package))
            self._send({name: changed[name]})
            if np.isnan(self.missed[name]):
                break

    def _tensors(self, package: Any) -> dict[str, torch.Tensor]:
        from async_grpo.weights.package import unpack

        return unpack(package.chunks)[0]

    def _miss(self, package: Any, logprobs: np.ndarray) -> float:
        from async_grpo.weights.package import canary_miss

        return canary_miss(logprobs - package.canary_logprobs) / package.tolerance

    def _receipt(self, package: Any) -> Any:
        """Load the package, unless the engine holds the same weights, and ask the canary."""
        if self.loaded is None or self.loaded[0] != package.manifest:
            chunks = [memoryview(chunk) for chunk in package.chunks]
            arrived = self.engine.run(self.engine.worker.update(package.version, chunks), 300)
            self.loaded = package.manifest, arrived
        return self.loaded[1], self._canary(package)

    def _canary(self, package: Any) -> np.ndarray:
        from async_grpo.protocols import answer_canary

        return self.engine.run(answer_canary(self.engine.worker, package.canary_texts), 300)

    def _send(self, tensors: dict[str, torch.Tensor]) -> Any:
        from async_grpo.weights.package import pack_weights

        self.loaded = None
        image = pack_weights(tensors, self.wire_dtype)[0]
        return self.engine.run(self.engine.worker.update(-2, [memoryview(image)]), 300)

    def commit(self, package: Any, landed: list[str]) -> None:
        """Do nothing: nobody waits for the weights."""

    def abort(self, error: BaseException) -> None:
        """Do nothing: the publisher raises the error."""

    def start(self, seed: int, watch: bool = False) -> None:
        """Run the self-test, and the sync at start: with fresh weights; of the real model with fresh canary texts."""
        from async_grpo.modeling.policy import named_weights
        from async_grpo.training.sharding import canary_logprobs
        from async_grpo.weights.canary import Canary
        from async_grpo.weights.config import WeightConfig
        from async_grpo.weights.publisher import Publisher

        begun = time.process_time()
        began_at = time.monotonic()
        if self.model != REAL:
            renew(self.masters, self.model, seed)
        self._cast()
        self.self_tests_delivered, self.watch, self.version = 0, watch, 0
        weights = self.policy.model.named_parameters()
        self.before = {n: w.detach().clone() for n, w in weights} if watch else {}
        canary = Canary.random(canary_logprobs, self.vocabulary, self.options.canary_tokens, seed)
        self.publisher = Publisher(self, named_weights, canary, self.wire_dtype, 0, WeightConfig())
        self.publisher.publish(self.policy, 0, self_test=True)()
        self.start_s.append(time.process_time() - begun)
        self.start_wall_s.append(time.monotonic() - began_at)

    def sync(self) -> None:
        """Send the same weights once more, and note the seconds."""
        self.loaded = None
        self.version += 1
        began_at = time.monotonic()
        self.publisher.publish(self.policy, self.version)()
        self.sync_wall_s.append(time.monotonic() - began_at)

    def step(self, generator: torch.Generator) -> None:
        """Make an update of AdamW's size at its start, and its sync."""
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


def measure(model: str, options: argparse.Namespace) -> bool:
    """Print the figures of one model, and return whether all is as it must be."""
    from engine_thread import EngineThread

    from async_grpo.data.smollm2 import VOCABULARY_SIZE, cached_smollm2

    with tempfile.TemporaryDirectory() as scratch:
        if model == REAL:
            folder, vocabulary = cached_smollm2(), VOCABULARY_SIZE
        else:
            folder, vocabulary = Path(scratch), VOCABULARY
            make_model(folder, model)
        settings = {"dtype": options.dtype, "max_total_tokens": 520, "vocab_size": vocabulary}
        with closing(EngineThread(folder, "lossy_extension.Lossy", **settings)) as engine:
            proof = Proof(engine, folder, options, model, vocabulary)
            title = f"{model} {options.dtype}"
            is_right = True
            if "healthy" in options.part:
                is_right = measure_healthy(proof, title) and is_right
            if "lost" in options.part:
                is_right = measure_lost(proof, title) and is_right
            if "steps" in options.part:
                for fault in ("everything", "tied head", ""):
                    measure_steps(proof, title, fault)
    return is_right


def measure_healthy(proof: Proof, title: str) -> bool:
    """Print how many healthy engines the self-test accepts, and return whether these are all."""
    from async_grpo.errors import AsyncGrpoError

    accepted, begun = 0, time.monotonic()
    repetitions = proof.options.repetitions
    first = proof.options.first_seed
    for seed in range(first, first + repetitions):
        try:
            proof.start(seed)
            proof.sync()
            accepted += 1
        except AsyncGrpoError as error:
            print(f"{title}: healthy engine refused: {error}")
        print(
            f"  {accepted} of {seed + 1 - first} accepted, at most {proof.worst:.2f} of what is allowed",
            flush=True,
        )
    print(
        f"{title}: healthy accepted {accepted} of {repetitions}, at most {proof.worst:.2f} of what is allowed while all "
        f"tensors are changed; unchanged weights differ by {proof.publisher._rounding:.2g}; "
        f"{time.monotonic() - begun:.0f} s, {np.median(proof.start_s):.1f} s of the trainer's CPU per start",
        flush=True,
    )
    if accepted:
        start_s = float(np.median(proof.start_wall_s))
        sync_s = float(np.median(proof.sync_wall_s))
        print(
            f"{title}: self-test and first sync {start_s:.2f} s, a sync {sync_s:.2f} s: the self-test costs "
            f"{start_s / sync_s - 1:.2f} syncs",
            flush=True,
        )
    return accepted == repetitions


def measure_lost(proof: Proof, title: str) -> bool:
    """Print what sees each tensor that is lost in turn, and return whether each of them is refused."""
    from async_grpo.errors import AsyncGrpoError

    try:
        proof.start(0, watch=True)
    except AsyncGrpoError as error:
        print(f"{title}: after losing its tensors in turn the engine is refused: {error}")
    unnamed = [name for name, is_named in proof.named.items() if not is_named]
    print(
        f"{title}: {len(proof.named)} tensors lost in turn: the read-back names {sum(proof.named.values())}, not: "
        f"{unnamed or 'none'}",
        flush=True,
    )
    if proof.missed:
        refused = sum(not missed <= 1 for missed in proof.missed.values())
        least, name = min((missed, name) for name, missed in proof.missed.items())
        print(
            f"{title}: of {len(proof.missed)} asked, the canary refuses {refused}, and misses by at least {least:.2f} of "
            f"what is allowed ({name})",
            flush=True,
        )
    if proof.wire_dtype is torch.float32:
        return bool(proof.missed) and all(not missed <= 1 for missed in proof.missed.values())
    return bool(proof.named) and not unnamed


def measure_steps(proof: Proof, title: str, fault: str) -> None:
    """Print at which sync after small steps an engine with `fault` is refused ('': a healthy one)."""
    from async_grpo.errors import AsyncGrpoError

    refused_at, generator = [], torch.Generator().manual_seed(1)
    proof.start(1)
    proof.lose(fault)
    for _ in range(proof.options.repetitions):
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
    refused = f"refused in {len(refused_at)} of {proof.options.repetitions}"
    print(f"{title}: steps of {STEP:g}, {what}: {refused} {refused_at}", flush=True)
    proof.lose()


def main() -> None:
    """Read the options and measure each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=(*SHAPES, REAL), action="append")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="to go on after an earlier part")
    parser.add_argument("--canary-tokens", type=int, default=512, help="of the longest canary text")
    parser.add_argument("--canary-every", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="lose each Nth tensor only")
    options = parser.parse_args()
    options.part = options.part or PARTS
    torch.set_num_threads(1)
    if "avx512_bf16" not in Path("/proc/cpuinfo").read_text():
        multiply_bfloat16_as_float32()
    are_right = [measure(model, options) for model in options.model or (*SHAPES, REAL)]
    if not all(are_right):
        sys.exit(1)


if __name__ == "__main__":
    main()
