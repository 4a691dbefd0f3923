"""Chunks of tensors, and the proof that a `WeightPackage` landed: what was sent and what arrived, tensor by tensor, and
the canary's log-probs of every worker against the trainer's."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from async_grpo.errors import WeightsDidNotLand
from async_grpo.modeling import full_tensor
from async_grpo.protocols import Manifest, Receipt, TensorRecord, WeightPackage

SELF_TEST = -2  # version of the weights of the start-up self-test; nothing is ever generated with them

_SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16"}  # the format's names of what travels
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BLOCK_TOKENS = (
    32  # of the canary, in a row: single tokens of a trained model are chaotic, sixteen in a row are not
)
_CHUNK = 1 << 17  # words per pass, even: they and their multipliers stay in a core's cache
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def tensor_digest(tensor: torch.Tensor) -> int:
    """A 64-bit digest of the bits of `tensor`, the same on every device, whatever its strides.

    Sum over words of word * odd multiplier of its position, modulo 2**64. A single changed word always changes the
    sum (an odd number is invertible), a swap of two different words changes it too. It guards against accidents
    (a lost, truncated, mixed up or stale tensor), not against an attacker.

    >>> a = torch.tensor([1.0, 2.0, 3.0])
    >>> tensor_digest(a) == tensor_digest(a.clone()), tensor_digest(a) == tensor_digest(a.flip(0))
    (True, False)
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.data_ptr() % 8 or not flat.numel():  # a slice of a larger buffer, which cannot be read by 8 bytes
        flat = flat.clone()
    words = flat.view(torch.int64 if flat.nbytes % 8 == 0 else _WORDS[tensor.element_size()])
    multipliers = _multipliers(_CHUNK, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        # Wraps as int64 does; even, so a multiplier stays odd
        offset = (start * _GOLDEN + 2**63) % 2**64 - 2**63
        total += (chunk * multipliers[: chunk.numel()]).sum() + chunk.sum() * offset
    return int(total)


@cache
def _multipliers(count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.int64, device=device) * _GOLDEN) | 1


def record(tensor: torch.Tensor) -> TensorRecord:
    """The record of one tensor."""
    return TensorRecord(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor_digest(tensor))


@torch.no_grad()
def pack_weights(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """A safetensors image (n,) uint8 of `weights`, and its tensors, which share its memory.

    They are gathered (a collective), cast to `dtype` and laid in place in one pass; `safetensors.torch.save` makes the
    same of whole tensors in three copies.
    """
    entries, end = {}, 0
    for name, weight in weights.items():
        begin, end = end, end + weight.numel() * dtype.itemsize
        shape = list(weight.shape)
        entries[name] = {"dtype": _SAFETENSORS[dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # the format's alignment; a digest reads by 8 bytes
    start = 8 + len(header)
    image = np.empty(start + end, np.uint8)
    image[:start] = np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8)
    words = torch.from_numpy(image[start:]).view(dtype)
    parts = words.split([weight.numel() for weight in weights.values()])
    tensors = {n: part.view(w.shape) for (n, w), part in zip(weights.items(), parts, strict=True)}
    for name, weight in weights.items():
        tensors[name].copy_(full_tensor(weight, dtype))
    return image, tensors


def unpack(chunks: Sequence[Any]) -> tuple[dict[str, torch.Tensor], Manifest]:
    """The tensors of safetensors images (anything that `bytes` takes), and their records."""
    tensors = {name: tensor for chunk in chunks for name, tensor in load(bytes(chunk)).items()}
    return tensors, {name: record(tensor) for name, tensor in tensors.items()}


def prove_landed(
    package: WeightPackage, worker_id: str, receipt: Receipt, last: np.ndarray | float = 0.0
) -> np.ndarray:
    """The proof of landing: what a worker received is what was sent, and what it computes is what we compute.

    Returns (N,) its canary log-probs minus the trainer's. `last`: the same of the weights before these. It is judged by
    the change since then, so that the part of the rounding that stays the same from sync to sync cancels.

    WeightsDidNotLand: naming worker, version, and the tensors or the difference.
    """
    received, logprobs = receipt
    check_received(package.manifest, received, worker_id)
    difference = logprobs - package.canary_logprobs
    change = canary_miss(difference - last)
    if not change <= package.tolerance:  # also catches NaN
        is_test = package.version == SELF_TEST
        what = "the start-up self-test" if is_test else f"policy version {package.version}"
        raise WeightsDidNotLand(
            f"worker {worker_id} received {what} bit by bit, yet computes other log-probs: they differ by "
            f"{change:.3g} (root mean square without the largest tenth, or the median of {BLOCK_TOKENS} tokens in a row; "
            f"allowed: {package.tolerance:.3g}). A tensor does not reach the place where the engine uses it (a tied "
            "head, a packed copy), or engine and trainer disagree on the model or its dtype. --canary-tolerance sets what "
            "is allowed; an engine with quantised weights (--engine-options quantization=...) may need it"
        )
    return difference


def check_received(sent: Manifest, received: Manifest, worker_id: str) -> None:
    """Compare what a worker received with what was sent.

    WeightsDidNotLand: naming the first few missing, unexpected and differing tensors.
    """
    problems = {
        "missing": [name for name in sent if name not in received],
        "unexpected": [name for name in received if name not in sent],
        "received, yet not in use": [name for name in sent if name in received and not received[name].in_use],
        "differing": [name for name in sent if name in received and received[name] != sent[name]],
    }
    if any(problems.values()):
        landed = len(sent) - len(problems["missing"]) - len(problems["differing"])
        named = (f"{what}: {', '.join(names[:5])}" for what, names in problems.items() if names)
        found = f"{landed} of {len(sent)} tensors as sent; {'; '.join(named)}"
        raise WeightsDidNotLand(f"worker {worker_id} received {found}")


def canary_miss(values: np.ndarray) -> float:
    """Return by how much log-probs of the canary differ, nats: `trimmed_rms`, or a larger median of tokens in a row.

    The medians of BLOCK_TOKENS tokens in a row see what is wrong at some positions only, a position that wraps around, say:
    these tokens may all be in the tenth that `trimmed_rms` leaves out.

    >>> late = np.where(np.arange(656) < 597, 0.0, 2.0)  # the last 59 tokens are wrong
    >>> trimmed_rms(late), canary_miss(late)
    (0.0, 2.0)
    """
    num_blocks = -(-len(values) // BLOCK_TOKENS)
    medians = [float(np.median(np.abs(block))) for block in np.array_split(values, num_blocks)]
    return max([trimmed_rms(values), *medians])


def trimmed_rms(values: np.ndarray) -> float:
    """Return the root mean square of `values` (N,) without the largest tenth; nan if one is nan, inf if one is infinite.

    In a trained model single tokens are chaotic: by rounding alone one log-prob in 140 differs by 7 nats while the median
    differs by 0.1, and the plain root mean square is that token's. A tensor that is lost moves most tokens.

    >>> trimmed_rms(np.array([3.0] * 9 + [1000.0])), trimmed_rms(np.array([3.0] * 8 + [1000.0] * 2)) > 300
    (3.0, True)
    >>> trimmed_rms(np.array([0.0] * 20 + [np.nan]))
    nan
    """
    if np.isnan(values).any():
        return float("nan")
    if np.isinf(values).any():
        return float("inf")
    ascending = np.sort(np.abs(values))
    kept = ascending[: len(values) - len(values) // 10]
    return float(np.sqrt(np.square(kept, dtype=np.float64).mean()))
