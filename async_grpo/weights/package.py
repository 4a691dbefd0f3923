"""Pack tensors into chunks, and prove that a worker computes with the weights of a `WeightPackage`.

The proof compares each received tensor with the tensor that was sent, and each worker's log-probs of the canary texts
with the trainer's.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from async_grpo.errors import WeightsDidNotLand
from async_grpo.modeling import full_tensor, is_lora_tensor
from async_grpo.protocols import Manifest, Receipt, TensorRecord, WeightPackage

SELF_TEST = -2  # policy version of the self-test at the start; no sample is generated with its weights

_SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16"}  # dtype -> its name in the safetensors format
_WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per word -> dtype
# Number of consecutive canary tokens over which a median is taken. In a trained model, rounding can change the
# log-probs of single tokens greatly, but not of half of the tokens in a block
BLOCK_TOKENS = 32
# Number of words that are hashed at once; it must be even. On a CPU, this many words and their multipliers fit into a
# core's cache. On a GPU, launching the kernels for fewer words would take longer than the computation
_CHUNK_WORDS = 1 << 17
_CHUNK_WORDS_ON_GPU = 1 << 24
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer


def tensor_digest(tensor: torch.Tensor) -> int:
    """Return a 64-bit digest of the bits of a tensor, the same on every device and for all strides.

    The digest is the sum of word * multiplier over all words, modulo 2**64, where each position has its own odd
    multiplier. A single changed word always changes the sum, because an odd number is invertible. A swap of two
    different words changes it as well, except in rare cases, such as words that differ only in their highest bit. The
    digest protects against accidents (a lost, truncated, mixed up or stale tensor), not against an attacker.

    >>> a = torch.tensor([1.0, 2.0, 3.0])
    >>> tensor_digest(a) == tensor_digest(a.clone()), tensor_digest(a) == tensor_digest(a.flip(0))
    (True, False)
    """
    flat = tensor.detach().contiguous().view(-1)
    if flat.data_ptr() % 8 or not flat.numel():
        # Copy the values into a new buffer, which is always aligned to words of 8 bytes. A slice of a larger buffer may
        # not be
        flat = flat.clone()
    word_dtype = torch.int64 if flat.nbytes % 8 == 0 else _WORD_DTYPES[tensor.element_size()]
    words = flat.view(word_dtype)
    chunk_words = _CHUNK_WORDS_ON_GPU if words.is_cuda else _CHUNK_WORDS
    multipliers = _multipliers(chunk_words, words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), chunk_words):
        chunk = words[start : start + chunk_words].to(torch.int64)
        # The word at index j has the multiplier (j * _GOLDEN) | 1. Since `start` is even, the word at start + i has the
        # multiplier of the word at i plus start * _GOLDEN. This line wraps that offset around to int64
        offset = (start * _GOLDEN + 2**63) % 2**64 - 2**63
        total += (chunk * multipliers[: chunk.numel()]).sum() + chunk.sum() * offset
    return int(total)


@cache
def _multipliers(count: int, device: torch.device) -> torch.Tensor:
    """Return the odd multipliers of the first `count` words of a tensor."""
    return (torch.arange(count, dtype=torch.int64, device=device) * _GOLDEN) | 1


def record(tensor: torch.Tensor) -> TensorRecord:
    """Return dtype, shape and digest of a tensor."""
    return TensorRecord(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        digest=tensor_digest(tensor),
    )


def refuse_no_tensors(weights: Mapping[str, torch.Tensor]) -> None:
    """Raise an error if there are no tensors to send.

    Without tensors, engines would answer with the weights that they already have, which would look like a proof.

    Raises:
        WeightsDidNotLand: There are no tensors.
    """
    if not weights:
        raise WeightsDidNotLand(
            "the policy has no tensors to send, so nothing would show which weights the engines compute with: its "
            "function for named weights yields none"
        )


def split_into_chunks(
    weights: Mapping[str, torch.Tensor], chunk_bytes: int, dtype: torch.dtype
) -> list[dict[str, torch.Tensor]]:
    """Split the weights, in order, into chunks of about `chunk_bytes` each, in `dtype`.

    An adapter gets chunks of its own. They are the same whether the adapter is sent together with its base or alone, so
    an adapter that is sent alone can be sent as changes to the one that was sent with the base.
    """
    chunks: list[dict[str, torch.Tensor]] = []
    room_bytes = 0
    is_adapter = False
    for name, weight in weights.items():
        if room_bytes <= 0 or is_lora_tensor(name) != is_adapter:
            chunks.append({})
            room_bytes = chunk_bytes
            is_adapter = is_lora_tensor(name)
        chunks[-1][name] = weight
        room_bytes -= weight.numel() * dtype.itemsize
    return chunks


@torch.no_grad()
def pack_weights(
    weights: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Gather the weights (a collective), cast them to `dtype`, and write them into a safetensors image, in one pass.

    An image has the bytes of a safetensors file, but in memory. `safetensors.torch.save` makes the same image, but
    needs all gathered tensors at once and copies them three times.

    Returns:
        The image (n,) uint8, and its tensors by name. The tensors share the image's memory.
    """
    header = _safetensors_header(weights, dtype)
    num_data_bytes = sum(weight.numel() for weight in weights.values()) * dtype.itemsize
    image = np.empty(len(header) + num_data_bytes, np.uint8)
    image[: len(header)] = np.frombuffer(header, np.uint8)
    data = torch.from_numpy(image[len(header) :]).view(dtype)
    tensors = {}
    begin = 0
    for name, weight in weights.items():
        end = begin + weight.numel()
        tensors[name] = data[begin:end].view(weight.shape)
        tensors[name].copy_(full_tensor(weight, dtype))
        begin = end
    return image, tensors


def _safetensors_header(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> bytes:
    """Return the bytes before the data of a safetensors image: the length of the JSON header, and the header."""
    entries = {}
    begin = 0
    for name, weight in weights.items():
        end = begin + weight.numel() * dtype.itemsize
        entries[name] = {
            "dtype": _SAFETENSORS[dtype],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # aligns the data to 8 bytes, because a digest reads words of 8 bytes
    return len(header).to_bytes(8, "little") + header


def unpack(chunks: Sequence[Any]) -> tuple[dict[str, torch.Tensor], Manifest]:
    """Return the tensors in safetensors images (see `pack_weights`), and the `TensorRecord` of each tensor.

    Args:
        chunks: The images, as objects that `bytes` accepts.
    """
    tensors: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        tensors |= load(bytes(chunk))
    return tensors, {name: record(tensor) for name, tensor in tensors.items()}


def prove_landed(
    package: WeightPackage, worker_id: str, receipt: Receipt, last: np.ndarray | float = 0.0
) -> np.ndarray:
    """Prove that a worker received the tensors that were sent, and computes the same log-probs as the trainer.

    Args:
        package: The weights that were sent.
        worker_id: The worker to check.
        receipt: The records of the received tensors, and the worker's log-probs of the canary texts.
        last: The result (N,) of this function for the worker's previous weights, or 0 if there were none. The function
            compares only the change since then with the tolerance, so that rounding errors that are the same in every
            sync cancel out.

    Returns:
        The canary log-probs (N,) of the worker minus the trainer's.

    Raises:
        WeightsDidNotLand: The proof failed. The message names the worker, the version, and the tensors or the
            difference.
    """
    received, logprobs = receipt
    check_received(package.manifest, received, worker_id)
    difference = logprobs - package.canary_logprobs
    change = canary_miss(difference - last)
    # `not <=`, unlike `>`, is also true if `change` is NaN. An infinite tolerance accepts no infinite change
    if not change <= package.tolerance or math.isinf(change):
        is_test = package.version == SELF_TEST
        weights = "the start-up self-test" if is_test else f"policy version {package.version}"
        raise WeightsDidNotLand(
            f"worker {worker_id} received {weights} unchanged, but its log-probs differ from the trainer's by "
            f"{change:.3g} (the root mean square over tokens without the largest tenth, or the largest median over "
            f"{BLOCK_TOKENS} consecutive tokens; allowed: {package.tolerance:.3g}). Either a tensor does not reach the "
            "place where the engine uses it (a tied head, a packed copy), or engine and trainer disagree on the model or "
            "its dtype. --canary-tolerance sets what is allowed; an engine with quantised weights (--engine-options "
            "quantization=...) may need it"
        )
    return difference


def canary_differences(package: WeightPackage, receipts: Mapping[str, Receipt]) -> dict[str, np.ndarray]:
    """Return each worker's canary log-probs (N,) minus the trainer's, by worker id."""
    differences = {}
    for worker_id, (_, logprobs) in receipts.items():
        differences[worker_id] = logprobs - package.canary_logprobs
    return differences


def check_received(sent: Manifest, received: Manifest, worker_id: str) -> None:
    """Compare the tensors that a worker received with those that were sent.

    Raises:
        WeightsDidNotLand: The tensors differ. The message names the first five tensors of each problem.
    """
    problems = {
        "missing": [name for name in sent if name not in received],
        "unexpected": [name for name in received if name not in sent],
        "received, yet not in use": [name for name in sent if name in received and not received[name].in_use],
        "differing": [name for name in sent if name in received and received[name] != sent[name]],
    }
    if any(problems.values()):
        num_landed = len(sent) - len(problems["missing"]) - len(problems["differing"])
        details = [f"{problem}: {', '.join(names[:5])}" for problem, names in problems.items() if names]
        raise WeightsDidNotLand(
            f"worker {worker_id} received {num_landed} of {len(sent)} tensors as sent; {'; '.join(details)}"
        )


def canary_miss(values: np.ndarray) -> float:
    """Return the difference between two sets of canary log-probs, as one number in nats.

    It is the largest of `trimmed_rms` and the medians over blocks of about BLOCK_TOKENS consecutive tokens. The medians
    detect errors that affect only some positions, such as positions that wrap around. `trimmed_rms` may miss these
    errors, because all wrong tokens may be in the tenth that it leaves out.

    Args:
        values: Differences (N,) of log-probs.

    >>> late = np.where(np.arange(656) < 597, 0.0, 2.0)  # the last 59 tokens are wrong
    >>> trimmed_rms(late), canary_miss(late)
    (0.0, 2.0)
    """
    num_blocks = -(-len(values) // BLOCK_TOKENS)
    medians = [float(np.median(np.abs(block))) for block in np.array_split(values, num_blocks)]
    return max([trimmed_rms(values), *medians])


def trimmed_rms(values: np.ndarray) -> float:
    """Return the root mean square of `values` (N,) without the largest tenth; nan if one is nan, inf if one is infinite.

    Rounding can change the log-probs of single tokens of a trained model greatly. In one model, 1 of 140 tokens changed
    by 7 nats, while the median change was 0.1. Such a token would dominate a plain root mean square. A lost tensor, in
    contrast, changes the log-probs of most tokens.

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
    smaller_values = ascending[: len(values) - len(values) // 10]
    return float(np.sqrt(np.square(smaller_values, dtype=np.float64).mean()))
