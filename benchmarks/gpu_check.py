"""Check on a GPU what cannot be checked on a CPU. Each check (row) is computed, timed and judged separately.

    scripts/gpu_check --part 1 --output-dir DIR  # half of the rows, in under 9 minutes on one GPU
    scripts/gpu_check --part 2 --output-dir DIR  # the other half; the report in DIR then has all rows
    scripts/gpu_check                            # all rows; those for which 9 minutes do not suffice are named
    scripts/gpu_check --only head --only step    # these rows
    scripts/gpu_check --tiny                     # with small sizes, also on a CPU: shows that the rows run
    scripts/gpu_check --ranks 8                  # on 8 GPUs: all rows on one GPU, then the rows for several ranks

Models have random weights in the shapes of Qwen2.5. No network is used, and neither vLLM nor Ray is imported. After
every row, `gpu_check.json` and `gpu_check.md` are written; rows that an earlier call on the same device wrote there are
kept. A row that takes too long is stopped. The exit code is 1 if a row failed or raised an error, and 0 if all passed.
Packages that are not installed are named.
"""

import gc
import importlib.metadata
import json
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import typer
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import Qwen2Config, Qwen2ForCausalLM

from async_grpo.algorithm.config import AlgorithmConfig
from async_grpo.messages import MicroBatch
from async_grpo.modeling import local_shard, packed
from async_grpo.modeling.load import empty_causal_lm
from async_grpo.modeling.logprobs import chunked_logprobs
from async_grpo.modeling.policy import DEFAULT_CHUNK_TOKENS, PolicyModel
from async_grpo.training.config import OptimizerConfig
from async_grpo.training.distributed import Ranks, distributed_run
from async_grpo.training.export import ModelExporter
from async_grpo.training.objective import Objective
from async_grpo.training.sharding import canary_logprobs, load_shards, shard_policy
from async_grpo.weights.canary import CANARY_TOKENS, Canary
from async_grpo.weights.package import canary_miss, tensor_digest
from async_grpo.weights.self_test import (
    UNCHANGED_ALLOWED,
    measure_sensitivity,
    perturbed,
    round_tolerance,
    self_test_groups,
)
from benchmarks import gpu_step

OPTIONAL = ("vllm", "ray", "flash_attn", "trl", "torchao")
HALF_B = gpu_step.QWEN_05B
ONE_B = HALF_B | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
SEVEN_B = ONE_B | {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
GB = 1e9


@dataclass
class Bench:
    """The device of the rows, and their sizes."""

    ranks: Ranks
    tiny: bool

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def of(self, full: Any, tiny: Any) -> Any:
        return tiny if self.tiny else full

    def model(self, shape: dict[str, Any], dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
        torch.manual_seed(gpu_step.SEED)
        with torch.device(self.device):
            return Qwen2ForCausalLM(Qwen2Config(**shape)).to(dtype)

    def policy(self, shape: dict[str, Any], **options: Any) -> PolicyModel:
        return shard_policy(
            PolicyModel(self.model(shape)), self.ranks, OptimizerConfig(**options), "bfloat16"
        )

    def objective(self) -> Objective:
        return Objective(AlgorithmConfig(policy_loss="ppo_clip"))

    def micro_batch(self, vocab: int, tokens: int, longest: int) -> MicroBatch:
        """Return a micro-batch of exactly this number of tokens."""
        rng, lengths = np.random.default_rng(0), []
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(left, int(rng.integers(longest // 4, longest + 1))))
        return gpu_step.random_micro_batch(rng, vocab, lengths)

    def seconds(self, call: Callable[[], Any], repeats: int = 5) -> float:
        """Return the median seconds of a call. A first call is not timed."""
        call()
        taken = []
        for _ in range(repeats):
            self.ranks.synchronize()
            begun = time.perf_counter()
            call()
            self.ranks.synchronize()
            taken.append(time.perf_counter() - begun)
        return float(np.median(taken))

    def peak_GB(self, call: Callable[[], Any]) -> float | None:
        """Return the device memory in GB that the call adds at its peak; None on a CPU."""
        if not self.on_gpu:
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        self.ranks.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / GB


Figures = dict[str, Any]  # the results of a row, with the key "passed"


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def gradients(bench: Bench) -> Figures:
    """1. Compare a packed bfloat16 gradient, and log-probs, with plain float32 of one sequence at a time."""
    shape, (sequences, longest, budget) = (
        bench.of(HALF_B, gpu_step.TINY),
        bench.of((32, 2048, 36_000), (12, 64, 256)),
    )
    batches = gpu_step.random_step(shape["vocab_size"], sequences, longest, budget)
    expected = gpu_step.reference_gradients(bench.model(shape), batches)
    policy = bench.policy(shape, gradient_checkpointing=True)
    figures = gpu_step.compare(gpu_step.packed_gradients(policy, bench.objective(), batches), expected)
    ids = batches[0].input_ids[: batches[0].cu_seqlens[1]]
    difference = canary_logprobs(policy, ids) - eager_logprobs(bench.model(shape), ids)
    figures["logprob_rms"] = float(np.sqrt(np.square(difference).mean()))
    return figures | {"passed": figures["gradient_cosine"] >= 0.999 and figures["logprob_rms"] < 0.03}


@torch.no_grad()
def eager_logprobs(model: Qwen2ForCausalLM, ids: np.ndarray) -> np.ndarray:
    """Return the log-probs (N,) by transformers' own forward; the first is 0."""
    tokens = torch.tensor(ids, dtype=torch.int64, device=model.device)
    logits = model(tokens[None]).logits[0, :-1].float()
    return np.concatenate([[0.0], -cross_entropy(logits, tokens[1:], reduction="none").cpu().numpy()])


def attention(bench: Bench) -> Figures:
    """2. Compare packed attention with SDPA of each sequence: forward, backward, grouped heads, a sliding window."""
    heads, grouped, width, window = 14, 2, 64, bench.of(128, 5)
    lengths = bench.of([700, 33, 1500, 1, 256], [7, 1, 12, 5])
    # The last token of a sequence is no input of the model
    ends = np.cumsum([0, *(length + 1 for length in lengths)])
    packing = packed.Packing(torch.arange(ends[-1], device=bench.device), torch.tensor(ends))
    bounds = packing.boundaries

    def run(dtype: torch.dtype, attend: Callable[..., Tensor], windowed: int | None) -> list[float]:
        torch.manual_seed(0)
        shapes = [(sum(lengths), n, width) for n in (heads, grouped, grouped)]
        q, k, v = (torch.randn(s, device=bench.device).to(dtype).requires_grad_() for s in shapes)
        weights = torch.randn(shapes[0], device=bench.device).to(dtype)
        out = attend(q, k, v)
        found = [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]
        wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
        parts = []
        for begin, end in pairwise(bounds.tolist()):
            one = [x[begin:end].transpose(0, 1)[None] for x in wide]
            t = torch.arange(end - begin, device=bench.device)
            seen = (t[:, None] >= t) & (t[:, None] - t <= (windowed if windowed is not None else end))
            parts.append(
                scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
            )
        expected = torch.cat(parts)
        right = [
            expected.detach(),
            *torch.autograd.grad((expected * weights.double()).sum(), wide),
        ]
        return [relative_error(a, b) for a, b in zip(found, right, strict=True)]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Packed attention gets the states of rows. No beginnings are equal here, so each token is a row
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return packed.packed_attention(torch.nn.Module(), q, k, v, None, packing=packing)[0][0]

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        limits = (packing.boundaries, packing.boundaries, packing.longest, packing.longest)
        return packed.varlen_attn(q, k, v, *limits, **packed.varlen_options(packed.varlen_attn, window))

    errors = {"float32": run(torch.float32, ours, None)}
    if bench.on_gpu:
        errors["bfloat16"] = run(torch.bfloat16, ours, None)
        errors["bfloat16, window"] = run(torch.bfloat16, kernel, window)
    flash = "used" if packed.flash_attn_varlen_func is not None else "not installed"
    passed = all(max(e) < (1e-5 if name == "float32" else 2e-2) for name, e in errors.items())
    return {"errors (out, dq, dk, dv)": errors, "flash_attn": flash, "passed": passed}


def sharded(bench: Bench) -> Figures:
    """3. Test FSDP2 with one rank, float32 weights and bfloat16 compute: recomputed activations give the same gradient."""
    shape = bench.of(HALF_B, gpu_step.TINY)
    batches = [bench.micro_batch(shape["vocab_size"], *bench.of((8192, 1024), (128, 32)))]
    found = [
        gpu_step.packed_gradients(
            bench.policy(shape, gradient_checkpointing=recomputed), bench.objective(), batches
        )
        for recomputed in (False, True)
    ]
    figures = gpu_step.compare(found[1], found[0])
    masters = {str(p.dtype) for p in bench.policy(shape).parameters()}
    passed = figures["gradient_cosine"] >= 0.9999 and masters == {"torch.float32"}
    return figures | {"masters": sorted(masters), "passed": passed}


def head(bench: Bench) -> Figures:
    """4. Compare the chunked head with the whole one: time and memory of forward and backward."""
    tokens, vocab, width = bench.of((16_384, 151_936, 1536), (512, 2048, 64))
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    hidden, weight = (
        torch.randn(n, width, device=bench.device).mul_(0.05).to(dtype).requires_grad_()
        for n in (tokens, vocab)
    )
    targets = torch.randint(0, vocab, (tokens,), device=bench.device)

    def chunked(size: int) -> None:
        logprobs, _ = chunked_logprobs(hidden, weight, None, targets, 1.0, size)
        torch.autograd.grad(logprobs.sum(), (hidden, weight))

    def whole() -> None:
        logits = torch.mm(hidden, weight.T).float()
        torch.autograd.grad(-cross_entropy(logits, targets, reduction="sum"), (hidden, weight))

    figures: Figures = {"tokens": tokens, "vocab": vocab}
    for size in bench.of((512, DEFAULT_CHUNK_TOKENS, 4096), (128,)):
        figures[f"chunks of {size}"] = {
            "seconds": bench.seconds(lambda size=size: chunked(size)),
            "peak_GB": bench.peak_GB(lambda size=size: chunked(size)),
        }
    with fits(figures, "whole"):
        figures["whole"] = {"seconds": bench.seconds(whole), "peak_GB": bench.peak_GB(whole)}
    default = figures[f"chunks of {bench.of(DEFAULT_CHUNK_TOKENS, 128)}"]
    if isinstance(figures["whole"], dict):
        figures["ratio"] = default["seconds"] / figures["whole"]["seconds"]
    # On a CPU with small sizes, a time says nothing
    return figures | {"passed": not bench.on_gpu or figures.get("ratio", 0.0) <= 1.15}


@contextmanager
def fits(figures: Figures, name: str) -> Iterator[None]:
    """Record a lack of memory in the block as a result, not as a failure."""
    try:
        yield
    except torch.OutOfMemoryError:
        figures[name] = "out of memory"
    clear()


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def step(bench: Bench) -> Figures:
    """5. Measure a whole step (forward, backward, AdamW): tokens/s, fraction of the matmul rate, memory, time by kernel."""
    size = bench.of(8192, 256)
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=bench.device).to(dtype) for _ in range(2))
    matmul = 2 * size**3 / bench.seconds(lambda: a @ b)
    copy = 2 * a.nbytes / bench.seconds(lambda: b.copy_(a))
    figures: Figures = {"matmul_TFLOPs": matmul / 1e12, "copy_GB_per_s": copy / GB}
    sizes = {"0.5B": HALF_B, "1.5B": ONE_B, "7B": SEVEN_B}
    for name, shape in bench.of(sizes, {"tiny": gpu_step.TINY}).items():
        for tokens in bench.of((4096, 16_384, 32_768), (256,)):
            if name == "7B" and tokens > 16_384:
                continue
            with fits(figures, f"{name} {tokens}"):
                figures[f"{name} {tokens}"] = full_step(bench, shape, tokens, matmul)
    aim = figures.get("1.5B 16384")
    return figures | {"passed": not bench.on_gpu or (isinstance(aim, dict) and aim["MFU"] >= 0.45)}


def full_step(bench: Bench, shape: dict[str, Any], tokens: int, ceiling: float) -> Figures:
    batch = bench.micro_batch(shape["vocab_size"], tokens, bench.of(2048, 64))
    policy = bench.policy(shape, gradient_checkpointing=True)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found = gpu_step.timed_steps(policy, bench.objective(), bench.ranks, [batch], bench.of(4, 1))
    flops = 6 * tokens * sum(p.numel() for name, p in policy.model.named_parameters() if "embed" not in name)
    if shape["tie_word_embeddings"]:
        # The head is applied to the completion only, half of the tokens
        flops += 6 * tokens * shape["vocab_size"] * shape["hidden_size"] // 2
    squares = int(np.square(np.diff(batch.cu_seqlens).astype(np.int64)).sum())
    # Causal attention needs half of 12
    flops += 6 * shape["num_hidden_layers"] * shape["hidden_size"] * squares
    model_flops = flops / found["step_seconds_median"]
    return {
        "tokens_per_second": found["tokens_per_second"],
        "MFU": model_flops / ceiling,  # fraction of the matmul rate that was measured here
        "model_TFLOPs": model_flops / 1e12,
        "peak_GB": found["peak_memory_GB"],
        "profile": profile(bench, policy, batch),
    }


def profile(bench: Bench, policy: PolicyModel, batch: MicroBatch) -> dict[str, float]:
    """Return the ten largest parts of the device's time in forward and backward, as fractions."""
    activity = torch.profiler.ProfilerActivity
    objective = bench.objective()
    activities = [activity.CPU, *([activity.CUDA] if bench.on_gpu else [])]
    with torch.profiler.profile(activities=activities) as recorded:
        gpu_step.backward(policy, objective, batch)
        bench.ranks.synchronize()
    policy.zero_grad(set_to_none=True)
    key = "self_device_time_total" if bench.on_gpu else "self_cpu_time_total"
    events = sorted(recorded.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in events) or 1
    return {event.key[:60]: round(getattr(event, key) / total, 3) for event in events[:10]}


def canary(bench: Bench) -> Figures:
    """6. Test the self-test in bfloat16, trainer packed and engine eager: no false alarm, and each lost tensor is found."""
    shapes = {"28 x 1536": ONE_B, "28 x 3584": SEVEN_B | {"vocab_size": 32_768}}
    shapes = bench.of(shapes, {"tiny": gpu_step.TINY})
    shapes |= {f"{name}, outliers": shape for name, shape in list(shapes.items())[:1]}
    figures: Figures = {}
    for name, shape in shapes.items():
        with fits(figures, name):
            figures[name] = self_test(bench, shape, "outliers" in name)
    ran = [found for found in figures.values() if isinstance(found, dict)]
    passed = bool(ran) and not any(found["refused"] or found["unseen"] for found in ran)
    return figures | {"passed": passed}


@torch.no_grad()
def with_outliers(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """Make four channels of the residual stream 50 times larger, and let the norms damp them, as in trained models."""
    channels = torch.arange(0, model.config.hidden_size, model.config.hidden_size // 4)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight[channels] *= 50
        elif "layernorm" in name:
            weight[channels] *= 0.1
    return model


def self_test(bench: Bench, shape: dict[str, Any], outliers: bool = False) -> Figures:
    """Run the rounds of `Publisher` for an engine that cannot read back: transformers' own forward in bfloat16."""
    ids = Canary.text(shape["vocab_size"], bench.of(CANARY_TOKENS[1], 128))
    engine, trained = (bench.model(shape, torch.bfloat16).eval() for _ in range(2))
    if outliers:
        engine, trained = with_outliers(engine), with_outliers(trained)
    policy = PolicyModel(trained).eval()
    ours, theirs = dict(trained.named_parameters()), dict(engine.named_parameters())
    unchanged = canary_logprobs(policy, ids)
    unchanged_sensitivity = measure_sensitivity(
        lambda: canary_logprobs(policy, ids), unchanged, ours, torch.bfloat16
    )
    rounding = canary_miss(eager_logprobs(engine, ids) - unchanged)
    refused, unseen, worst = [], [], 0.0
    for group in self_test_groups(ours):
        before = {name: theirs[name].detach().clone() for name in group}
        with perturbed({n: w for n, w in ours.items() if n in group}):
            expected = canary_logprobs(policy, ids)
            sensitivity = measure_sensitivity(
                lambda: canary_logprobs(policy, ids), expected, ours, torch.bfloat16
            )
            allowed = round_tolerance(sensitivity, unchanged_sensitivity, rounding, torch.bfloat16)
            with perturbed({n: w for n, w in theirs.items() if n in group}):
                missed = canary_miss(eager_logprobs(engine, ids) - expected)
                worst = max(worst, missed / allowed)
                refused += [min(group)] if missed > allowed else []
                for name in group:
                    arrived = theirs[name].detach().clone()
                    theirs[name].data.copy_(before[name])
                    unseen += [name] if canary_miss(eager_logprobs(engine, ids) - expected) <= allowed else []
                    theirs[name].data.copy_(arrived)
    return {
        "rounding_rms": rounding,
        "rounding_below_its_limit": rounding < UNCHANGED_ALLOWED[torch.bfloat16],
        "worst_miss_over_allowed": worst,
        "refused": refused,
        "unseen": unseen,
        "tensors": len(ours),
    }


def sync(bench: Bench) -> Figures:
    """7. Measure the parts of a weight sync in seconds per GB of bfloat16, and a copy on the device and to the host.

    With several ranks, also measure gathering the shards and a broadcast, which NCCL does in a sync.
    """
    number = bench.of(1 << 29, 1 << 20)
    master = torch.randn(number, device=bench.device)
    wire = master.bfloat16()
    host = torch.empty(number, dtype=torch.bfloat16, pin_memory=bench.on_gpu)
    pageable = torch.empty(number, dtype=torch.bfloat16)
    work = {
        "copy on the device": lambda: wire.clone(),
        "cast float32 to bfloat16": lambda: master.bfloat16(),
        "digest": lambda: tensor_digest(wire),
        "to the host": lambda: host.copy_(wire),
        "to the host, pageable": lambda: pageable.copy_(wire),  # as in a sync through the object store
        "digest on the host": lambda: tensor_digest(host[: number // 8]),
    }
    if bench.ranks.world_size > 1:
        mesh = init_device_mesh(bench.device.type, (bench.ranks.world_size,))
        shard = DTensor.from_local(wire.chunk(bench.ranks.world_size)[bench.ranks.rank], mesh, [Shard(0)])
        spread = wire.clone()
        work |= {"gather": lambda: shard.full_tensor(), "broadcast": lambda: dist.broadcast(spread, 0)}
    share = {"digest on the host": 8}
    found = {
        name: bench.seconds(call, 3) / wire.nbytes * GB * share.get(name, 1) for name, call in work.items()
    }
    same = tensor_digest(wire) == tensor_digest(host)
    return {"seconds_per_GB": found, "same_digest_on_host": same, "passed": same}


def against_transformers(bench: Bench) -> Figures:
    """8. Compare with plain transformers (padded rows, autocast, AdamW): the library must reach 1.3 x its tokens/s."""
    shape = bench.of(HALF_B, gpu_step.TINY)
    batch = bench.micro_batch(shape["vocab_size"], *bench.of((16_384, 2048), (256, 64)))
    policy = bench.policy(shape, gradient_checkpointing=True)
    ours = gpu_step.timed_steps(policy, bench.objective(), bench.ranks, [batch], bench.of(5, 2))
    del policy
    clear()
    model = bench.model(shape).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=bench.on_gpu)
    parts = [torch.tensor(batch.input_ids[a:b]).long() for a, b in pairwise(batch.cu_seqlens)]
    rows = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).to(bench.device)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in parts], batch_first=True).to(rows)

    def plain() -> None:
        for ids, seen in zip(rows.split(4), mask.split(4), strict=True):
            with torch.autocast(bench.device.type, torch.bfloat16):
                logits = model(ids, attention_mask=seen).logits[:, :-1]
            taken = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            (taken * seen[:, 1:].flatten()).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    theirs = len(batch.input_ids) / bench.seconds(plain, bench.of(3, 1))
    ratio = ours["tokens_per_second"] / theirs
    return {
        "ours_tokens_per_second": ours["tokens_per_second"],
        "transformers_tokens_per_second": theirs,
        "ratio": ratio,
        "trl": installed("trl"),
        "passed": not bench.on_gpu or ratio >= 1.3,
    }


def memory(bench: Bench) -> Figures:
    """10. Test offloading, copies of the shards (several ranks) and 8-bit moments: the same gradient; measure memory."""
    shape, (ranks, world_size) = bench.of(HALF_B, gpu_step.TINY), (bench.ranks, bench.ranks.world_size)
    layouts: dict[str, dict[str, Any]] = {"plain": {}, "offloaded": {"cpu_offload": True}}
    if world_size > 1:
        layouts["copies"] = {"fsdp_size": world_size // 2 if world_size % 2 == 0 else 1}
    tokens, longest = bench.of((8192, 1024), (128, 32))
    batches = [bench.micro_batch(shape["vocab_size"], tokens + longest * ranks.rank, longest)]
    figures, plain, passed = dict[str, Any](), {}, True
    for name, options in layouts.items():
        gradients = gpu_step.packed_gradients(bench.policy(shape, **options), bench.objective(), batches)
        plain = plain or gradients
        figures[name] = gpu_step.compare(gradients, plain) | training_cost(bench, shape, batches, **options)
        passed = passed and figures[name]["gradient_cosine"] > 0.9999
    figures["8-bit moments"] = "torchao is not installed"
    if installed("torchao") != "not installed":
        figures["8-bit moments"] = training_cost(bench, shape, batches, "adamw_8bit")
    return figures | {"passed": passed}


def training_cost(
    bench: Bench, shape: dict[str, Any], batches: list[MicroBatch], optimizer: str = "adamw", **options: Any
) -> Figures:
    clear()
    policy = bench.policy(shape, gradient_checkpointing=True, **options)
    steps = gpu_step.timed_steps(policy, bench.objective(), bench.ranks, batches, bench.of(3, 1), optimizer)
    return {name: steps[name] for name in ("tokens_per_second", "peak_memory_GB")}


def loading(bench: Bench) -> Figures:
    """11. Let each rank read its own rows of the weights, export the model, compare; measure peak memory and seconds."""
    shape, figures = bench.of(ONE_B, gpu_step.TINY), dict[str, Any]()
    with tempfile.TemporaryDirectory() if bench.ranks.is_main else nullcontext("") as scratch:
        folders: list[Any] = [scratch]
        if bench.ranks.world_size > 1:
            dist.broadcast_object_list(folders, 0)
        folder = Path(folders[0])
        if bench.ranks.is_main:
            bench.model(shape, torch.bfloat16).save_pretrained(folder / "model", max_shard_size="1GB")
        bench.ranks.max([0.0])  # all ranks wait here until the file is written
        made: list[PolicyModel] = []

        def load() -> None:
            made.append(PolicyModel(empty_causal_lm(folder / "model")))
            shard_policy(made[0], bench.ranks, dtype="bfloat16")
            load_shards(made[0], folder / "model", bench.device)

        figures["loading"] = peaks(bench, load)
        largest = 4 * max(p.numel() for p in made[0].parameters()) / GB
        held = sum(local_shard(p).nbytes for p in made[0].parameters()) / GB
        exporter = ModelExporter(folder, folder / "model", bench.ranks)
        figures["export"] = peaks(bench, lambda: exporter.save(made[0], 1))
        figures |= {"shard_GB": held, "largest_tensor_GB": largest}
        taken = figures["loading"]["device_GB" if bench.on_gpu else "host_GB"]
        passed = taken <= held + largest + 0.5
        if bench.ranks.is_main:
            both = [folder / "model", folder / "hf_format" / "samples_1"]
            before, after = ([load_file(f) for f in sorted(path.glob("*.safetensors"))] for path in both)
            then, now = ({n: t for file in files for n, t in file.items()} for files in (before, after))
            passed = passed and all(torch.equal(now[name], tensor) for name, tensor in then.items())
        bench.ranks.max([0.0])
    return figures | {"passed": passed}


def peaks(bench: Bench, call: Callable[[], Any]) -> Figures:
    """Return the memory that a call adds at its peak, on the device and in this process, and its seconds."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the recorded peak of the process
    before, begun = host_peak_GB(), time.perf_counter()
    device = bench.peak_GB(call) if bench.on_gpu else call()
    return {
        "device_GB": device if bench.on_gpu else None,
        "host_GB": host_peak_GB() - before,
        "seconds": time.perf_counter() - begun,
    }


def host_peak_GB() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / GB


def compiled(bench: Bench) -> Figures:
    """9. Test `--torch-compile`: time with and without it, and how often other packings make the layers compile again."""
    shape = bench.of(HALF_B, gpu_step.TINY)
    policy = bench.policy(shape)
    layouts = [
        bench.micro_batch(shape["vocab_size"], n * bench.of(1024, 32), bench.of(1024, 32))
        for n in (4, 5, 7, 8)
    ]
    objective = bench.objective()

    def steps() -> None:
        for batch in layouts:
            gpu_step.backward(policy, objective, batch)
        policy.zero_grad(set_to_none=True)

    figures: Figures = {"off_seconds": bench.seconds(steps, bench.of(3, 1))}
    torch._dynamo.utils.counters.clear()
    backend = "inductor" if bench.on_gpu else "eager"  # on a CPU, only count how often layers compile again
    with mock.patch("torch.compile", partial(torch.compile, backend=backend)):
        policy = bench.policy(shape, torch_compile=True)
    begun = time.perf_counter()
    steps()
    figures |= {
        "first_seconds": time.perf_counter() - begun,
        "on_seconds": bench.seconds(steps, bench.of(3, 1)),
    }
    counted = torch._dynamo.utils.counters
    graphs, reasons = counted["stats"]["unique_graphs"], dict(counted["graph_break"])
    speedup = figures["off_seconds"] / figures["on_seconds"]
    more = {"graphs": graphs, "graph_breaks": {k[:100]: n for k, n in reasons.items()}}
    return figures | more | {"backend": backend, "speedup": speedup, "passed": graphs > 0}


ROWS: dict[str, Callable[[Bench], Figures]] = {
    "gradients": gradients,
    "attention": attention,
    "sharded": sharded,
    "head": head,
    "step": step,
    "canary": canary,
    "sync": sync,
    "transformers": against_transformers,
    "compile": compiled,
    "memory": memory,
    "loading": loading,
}
# Rows of each part of `--part`. The first part has what a training step needs, the second everything else
PARTS = {
    1: ("gradients", "attention", "sharded", "head", "step"),
    2: ("canary", "sync", "transformers", "compile", "memory", "loading"),
}
LIMIT_S = 510.0  # for one call; half a minute of 9 minutes remains for its start and end
OF_RANKS = ("sync", "memory", "loading")  # rows that several ranks compute together


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@contextmanager
def stopped_after(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the time is over."""

    def stop(*_: Any) -> None:
        raise TimeoutError(
            f"stopped after {limit_s:.0f} s, the rest of --limit-s: run this row alone (--only)"
        )

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def checked(row: Callable[[Bench], Figures], bench: Bench, limit_s: float = LIMIT_S) -> Figures:
    """Return the results of a row with its outcome: passed, failed or broke (with the error)."""
    begun = time.perf_counter()
    try:
        with stopped_after(limit_s):
            figures = row(bench)
        figures = {"outcome": "passed" if figures.pop("passed") else "failed", **figures}
    except Exception as error:
        traceback.print_exc()
        figures = {"outcome": "broke", "error": f"{type(error).__name__}: {error}"[:500]}
    clear()
    return {**figures, "seconds": time.perf_counter() - begun}


def table(report: dict[str, Any]) -> str:
    lines = [f"On {report['device']}, torch {report['torch']}.", "", "| row | outcome | s | figures |"]
    lines.append("|---|---|---|---|")
    for name, figures in report["rows"].items():
        rest = {k: v for k, v in figures.items() if k not in ("outcome", "seconds")}
        said = json.dumps(rest, default=str).replace("|", "/")
        lines.append(f"| {name} | {figures['outcome']} | {figures.get('seconds', 0):.0f} | {said} |")
    return "\n".join(lines) + "\n"


def main(
    tiny: Annotated[bool, typer.Option(help="Use small shapes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"Run only these rows: {', '.join(ROWS)}.")] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("outputs"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    limit_s: Annotated[float, typer.Option(help="Seconds for all rows of this call.")] = LIMIT_S,
    part: Annotated[int | None, typer.Option(help="Run one half of the rows: 1 or 2.", min=1, max=2)] = None,
    ranks: Annotated[
        int, typer.Option(help=f"Then run {', '.join(OF_RANKS)} with this number of ranks.")
    ] = 1,
) -> None:
    if unknown := set(only or ()) - ROWS.keys():
        raise typer.BadParameter(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if part is not None:
        only = [row for row in PARTS[part] if row in (only or ROWS)]
    failed = check_rows(tiny, only, output_dir, device, limit_s)
    if ranks > 1 and (rows := [row for row in OF_RANKS if row in (only or OF_RANKS)]):
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            "--standalone",
        ]
        given = [
            f"--output-dir={output_dir / f'{ranks}_ranks'}",
            f"--device={device}",
            f"--limit-s={limit_s}",
        ]
        given += [*(f"--only={row}" for row in rows), *(["--tiny"] if tiny else [])]
        done = subprocess.run([*torchrun, "-m", "benchmarks.gpu_check", *given], check=False)
        failed = failed or done.returncode != 0
    if failed:
        raise typer.Exit(1)


def earlier_rows(output_dir: Path, report: dict[str, Any]) -> dict[str, Figures]:
    """Return the rows that an earlier call wrote, if device, versions and sizes are the same."""
    path = output_dir / "gpu_check.json"
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    return earlier["rows"] if all(earlier.get(key) == value for key, value in report.items()) else {}


def check_rows(tiny: bool, only: list[str] | None, output_dir: Path, device: str, limit_s: float) -> bool:
    """Run rows, and return whether one of them failed."""
    begun = time.perf_counter()
    output_dir.mkdir(parents=True, exist_ok=True)
    with distributed_run(device) as ranks:
        bench = Bench(ranks, tiny)
        report: dict[str, Any] = {"device": gpu_step.device_name(ranks.device), "torch": torch.__version__}
        report |= {"tiny": tiny, "installed": {name: installed(name) for name in OPTIONAL}}
        report["rows"] = earlier_rows(output_dir, report)
        rows = only or list(ROWS)
        for name in rows:
            left_s = limit_s - (time.perf_counter() - begun)
            if left_s <= 0:
                report["rows"][name] = {"outcome": "not run: out of time"}
            else:
                report["rows"][name] = checked(ROWS[name], bench, left_s)
            if not ranks.is_main:
                continue
            print(f"{name}: {report['rows'][name]['outcome']}", flush=True)
            (output_dir / "gpu_check.json").write_text(json.dumps(report, indent=2, default=str))
            (output_dir / "gpu_check.md").write_text(table(report))
        failed = any(report["rows"][name]["outcome"] != "passed" for name in rows)
        failed = bool(ranks.max([float(failed)])[0])  # whether a row failed on any rank
        if ranks.is_main:
            print(table(report))
    return failed


if __name__ == "__main__":
    typer.run(main)
