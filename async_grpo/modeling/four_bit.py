"""Frozen weights in 4 bits (NF4; Dettmers et al. 2023, "QLoRA", section 3): codes and scales in place of a weight.

A row of a weight is divided into blocks of 64 values. A block is stored as one scale, its largest magnitude, in float32,
and a code of 4 bits for each value, which is the number of the nearest of 16 levels. Codes and bytes are those of
bitsandbytes without double quantisation. The blocks lie within rows, so a shard of some rows is quantised as the whole is.

Codes and scales are plain tensors of bytes, which FSDP shards, gathers and offloads as they are. It would cast
floating-point numbers to the dtype of the computation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding, linear

BLOCK = 64  # number of values with one scale
CODES = "codes"  # last parts of the names of a layer's stored tensors
SCALES = "scales"
BYTES_PER_WEIGHT = 0.5 + 4 / BLOCK
# The levels of NF4, as bitsandbytes has them: quantiles of a normal distribution, scaled to [-1, 1], with an exact zero
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# Number of values that are dequantised at once, whose float32 values and positions need 6 bytes each
CHUNK_VALUES = 1 << 22


@dataclass(frozen=True)
class FourBitWeight:
    """A weight that is stored in 4 bits. `full_tensor` returns its dequantised values, with which the layer computes."""

    codes: Tensor  # (out, in / 2), two codes in a byte, that of the first value in the high bits
    scales: Tensor  # (out, in / 16), float32 numbers as bytes
    dtype: torch.dtype  # dtype of the dequantised values

    @property
    def shape(self) -> torch.Size:
        """Return the shape (out, in) of the weight."""
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    @property
    def device(self) -> torch.device:
        """Return the device that stores the codes."""
        return self.codes.device

    def numel(self) -> int:
        """Return the number of values of the weight."""
        return 2 * self.codes.numel()

    def element_size(self) -> int:
        """Return the bytes of one dequantised value."""
        return self.dtype.itemsize


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (out, in / 2) and scales (out, in / 16) of a weight (out, in), both as bytes."""
    num_rows, num_columns = weight.shape
    blocks = weight.detach().float().reshape(num_rows, num_columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=-1)
    # In a block of zeros, 0 times infinity would be NaN
    inverse_scales = scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
    shares = blocks * inverse_scales[..., None]
    levels = torch.tensor(LEVELS, device=weight.device)
    boundaries = (levels[:-1] + levels[1:]) / 2
    codes = torch.bucketize(shares, boundaries, out_int32=True).to(torch.uint8).flatten(1)
    return codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)


def dequantised(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (out, in) of codes and scales, each rounded once to `dtype`."""
    num_rows, num_bytes = codes.shape
    values = torch.empty(num_rows, 2 * num_bytes, dtype=dtype, device=codes.device)
    num_chunk_rows = max(1, CHUNK_VALUES // max(1, 2 * num_bytes))
    for start in range(0, num_rows, num_chunk_rows):
        rows = slice(start, start + num_chunk_rows)
        levels = embedding(codes[rows].int(), _levels_of_bytes(codes.device))
        block_scales = scales[rows].view(torch.float32)
        blocks = levels.view(*block_scales.shape, BLOCK).mul_(block_scales[..., None])
        values[rows] = blocks.flatten(1)
    return values


@cache
def _levels_of_bytes(device: torch.device) -> Tensor:
    """Return the two levels of each byte of codes, as a tensor (256, 2)."""
    levels = torch.tensor(LEVELS)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1).to(device)


class _Product(torch.autograd.Function):
    """W x + b. Only the codes and scales of W are kept for the backward pass, and W is dequantised there again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return linear(x, dequantised(codes, scales, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        codes, scales = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return gradient @ dequantised(codes, scales, gradient.dtype), None, None, None


class FourBitLinear(nn.Module):
    """A linear layer whose frozen weight is stored in 4 bits.

    Args:
        layer: The layer to replace, on the device of the new layer. If it is on the "meta" device, codes and scales are
            empty.
        dtype: The dtype of the computation.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = dtype
        self.codes = nn.Parameter(self._empty_bytes(2, layer), requires_grad=False)
        self.scales = nn.Parameter(self._empty_bytes(BLOCK // 4, layer), requires_grad=False)
        self.bias = layer.bias
        if not layer.weight.is_meta:
            for name, value in self.stored(layer.weight).items():
                getattr(self, name).data.copy_(value)

    def _empty_bytes(self, values_per_byte: int, layer: nn.Linear) -> Tensor:
        """Return a tensor of bytes for each row of the layer's weight, on its device."""
        num_bytes = self.in_features // values_per_byte
        return torch.empty(self.out_features, num_bytes, dtype=torch.uint8, device=layer.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + b with the dequantised W."""
        return _Product.apply(x, self.codes, self.scales, self.bias)

    @property
    def stored_weight(self) -> FourBitWeight:
        """Return the weight. If the layer is sharded, it is this rank's shard."""
        return FourBitWeight(self.codes, self.scales, self.dtype)

    def empty_weight(self, device: torch.device) -> Tensor:
        """Return an empty float32 tensor for the weight, sharded as the codes are, for `stored`."""
        codes: Any = self.codes
        num_columns = self.in_features
        if not isinstance(codes, DTensor):
            return torch.empty(self.out_features, num_columns, device=device)
        rows = torch.empty(codes.to_local().shape[0], num_columns, device=device)
        return DTensor.from_local(
            rows,
            codes.device_mesh,
            codes.placements,
            run_check=False,
            shape=torch.Size((self.out_features, num_columns)),
            stride=(num_columns, 1),
        )

    @torch.no_grad()
    def stored(self, weight: Tensor) -> dict[str, Tensor]:
        """Return codes and scales of a weight by their names, sharded as the weight is."""
        if not isinstance(weight, DTensor):
            codes, scales = quantised(weight)
            return {CODES: codes, SCALES: scales}
        shards = self.stored(weight.to_local())
        tensors: dict[str, Tensor] = {}
        for name, shard in shards.items():
            num_bytes = shard.shape[1]
            tensors[name] = DTensor.from_local(
                shard,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=torch.Size((self.out_features, num_bytes)),
                stride=(num_bytes, 1),
            )
        return tensors


def can_be_four_bit(layer: nn.Linear) -> bool:
    """Return whether each row of a layer's weight can be divided into blocks of BLOCK values."""
    return layer.in_features % BLOCK == 0


def put_in_four_bits(model: nn.Module, layers: Sequence[str], dtype: torch.dtype) -> None:
    """Replace linear layers by ones whose weights are stored in 4 bits. In a layer with an adapter, replace the base.

    Args:
        model: The model, with or without adapters. It may be empty ("meta").
        layers: The names of the layers in the model without adapters.
        dtype: The dtype of the computation.
    """
    for name in layers:
        module: Any = model.get_submodule(name)
        if hasattr(module, "base_layer"):
            module.base_layer = FourBitLinear(module.base_layer, dtype)
        else:
            model.set_submodule(name, FourBitLinear(module, dtype))


def four_bit_modules(model: nn.Module) -> Iterator[tuple[str, FourBitLinear]]:
    """Yield (name, layer) of each layer whose weight is stored in 4 bits, in the model's order."""
    for name, module in model.named_modules():
        if isinstance(module, FourBitLinear):
            yield name, module
