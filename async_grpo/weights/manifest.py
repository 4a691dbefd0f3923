"""What was sent and what arrived, tensor by tensor: name, dtype, shape and a digest of the bits."""

import torch

from async_grpo.errors import WeightsDidNotLand
from async_grpo.protocols import Manifest, TensorRecord

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # words per pass: the int64 scratch space stays at 24 MB whatever the tensor
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
    if flat.data_ptr() % 8:  # a slice of a larger buffer, which cannot be read by 8 bytes
        flat = flat.clone()
    words = flat.view(torch.int64 if flat.nbytes % 8 == 0 else _WORDS[tensor.element_size()])
    steps = torch.arange(min(_CHUNK, words.numel()), dtype=torch.int64, device=words.device) * _GOLDEN
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        offset = (start * _GOLDEN + 2**63) % 2**64 - 2**63  # wraps as int64 does
        total += (chunk * ((steps[: chunk.numel()] + offset) | 1)).sum()
    return int(total)


def record(tensor: torch.Tensor) -> TensorRecord:
    """The record of one tensor."""
    return TensorRecord(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor_digest(tensor))


def check_received(sent: Manifest, received: Manifest, worker_id: str) -> None:
    """Compare what a worker received with what was sent.

    Raises:
        WeightsDidNotLand: naming the first few missing, unexpected and differing tensors.

    >>> one = {"w": record(torch.ones(2))}
    >>> check_received(one, one, "g0")
    >>> check_received(one, {}, "g0")
    Traceback (most recent call last):
    ...
    async_grpo.errors.WeightsDidNotLand: worker g0 received 0 of 1 tensors as sent; missing: w
    """
    missing = [name for name in sent if name not in received]
    unexpected = [name for name in received if name not in sent]
    differing = [name for name in sent if name in received and received[name] != sent[name]]
    if not (missing or unexpected or differing):
        return
    problems = [
        f"{label}: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        for label, names in (("missing", missing), ("unexpected", unexpected), ("differing", differing))
        if names
    ]
    landed = len(sent) - len(missing) - len(differing)
    raise WeightsDidNotLand(
        f"worker {worker_id} received {landed} of {len(sent)} tensors as sent; {'; '.join(problems)}"
    )
