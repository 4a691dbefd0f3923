"""Weights in 4 bits: codes, scales, values and gradients, beside arithmetic and beside bitsandbytes."""

import numpy as np
import pytest
import torch
from bits_and_bytes import needs_bits_and_bytes, of_bits_and_bytes
from torch import nn

from async_grpo.modeling import full_tensor
from async_grpo.modeling.four_bit import (
    BYTES_PER_WEIGHT,
    LEVELS,
    FourBitLinear,
    FourBitWeight,
    dequantised,
    four_bit_modules,
    put_in_four_bits,
    quantised,
)

DTYPES = (torch.float32, torch.bfloat16)


def some_weight(rows=96, columns=192, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(rows, columns, generator=generator)
    weight[3, 64:128] = 0.0  # a whole block
    weight[4] *= 1e-6
    return weight.to(dtype)


def values_by_arithmetic(weight):
    """The nearest level to each value divided by the largest magnitude of its 64 neighbours, value by value."""
    values = np.zeros_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 64):
            block = weight[row, start : start + 64]
            scale = np.abs(block).max()
            for column, value in enumerate(block):
                distances = [abs(value - np.float64(level) * scale) for level in LEVELS]
                values[row, start + column] = np.float32(LEVELS[int(np.argmin(distances))]) * scale
    return values


def test_each_value_becomes_the_nearest_level_of_its_block():
    weight = some_weight()
    values = dequantised(*quantised(weight), torch.float32)
    assert np.array_equal(values.numpy(), values_by_arithmetic(weight.numpy()))
    assert 0 < (values - weight).norm() < 0.12 * weight.norm()
    assert (values[3, 64:128] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_values_are_rounded_once_to_the_dtype_also_in_chunks_of_rows(dtype, monkeypatch):
    codes, scales = quantised(some_weight())
    expected = dequantised(codes, scales, torch.float32).to(dtype)
    assert torch.equal(dequantised(codes, scales, dtype), expected)
    monkeypatch.setattr("async_grpo.modeling.four_bit.CHUNK_VALUES", 5 * 192)
    assert torch.equal(dequantised(codes, scales, dtype), expected)


def test_a_shard_of_rows_is_quantised_as_the_whole_is():
    weight = some_weight()
    for whole, shard in zip(quantised(weight), quantised(weight[10:33]), strict=True):
        assert torch.equal(whole[10:33], shard)
    num_bytes = sum(part.numel() for part in quantised(weight))
    assert num_bytes == BYTES_PER_WEIGHT * weight.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_computes_as_one_with_the_values_and_keeps_no_values_for_the_backward_pass(dtype):
    torch.manual_seed(0)
    plain = nn.Linear(192, 96)
    layer = FourBitLinear(plain, dtype)
    values = full_tensor(layer.stored_weight)
    x = torch.randn(7, 192).to(dtype).requires_grad_()
    upstream = torch.randn(7, 96).to(dtype)
    layer.bias.requires_grad_(False)
    layer.bias.data = layer.bias.to(dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(x)
    (gradient,) = torch.autograd.grad(output, x, upstream)
    expected = nn.functional.linear(x, values, layer.bias)
    (expected_gradient,) = torch.autograd.grad(expected, x, upstream)
    assert torch.equal(output, expected) and torch.equal(gradient, expected_gradient)
    assert sum(tensor.nbytes for tensor in kept) == BYTES_PER_WEIGHT * values.numel()
    assert values.dtype is dtype and full_tensor(layer.stored_weight, torch.float64).dtype is torch.float64


def test_the_backward_pass_can_be_checked_by_differences():
    torch.manual_seed(0)
    layer = FourBitLinear(nn.Linear(64, 5), torch.float64)
    layer.bias.requires_grad_(False)
    layer.bias.data = layer.bias.double()
    assert torch.autograd.gradcheck(layer, torch.randn(3, 64, dtype=torch.float64, requires_grad=True))


def test_only_the_named_layers_are_replaced_and_an_empty_model_stays_empty():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 8), nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 3)))
    put_in_four_bits(model, ["0", "1.0"], torch.bfloat16)
    layers = dict(four_bit_modules(model))
    assert set(layers) == {"0", "1.0"} and type(model[1][1]) is nn.Linear
    assert layers["1.0"].codes.is_meta and layers["1.0"].codes.shape == (64, 64)
    assert layers["1.0"].scales.shape == (64, 8) and layers["1.0"].stored_weight.shape == (64, 128)
    assert layers["0"].empty_weight(torch.device("cpu")).shape == (8, 64)


IN_BITS_AND_BYTES = """
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
found = {}
for name, weight in torch.load("weights.pt").items():
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
    found[name] = codes.flatten(), state.absmax, dequantize_4bit(codes, state), state.code
torch.save(found, "found.pt")
"""


@needs_bits_and_bytes
def test_codes_scales_and_values_are_those_of_bitsandbytes(tmp_path):
    weights = {str(dtype): some_weight(dtype=dtype) for dtype in DTYPES}
    torch.save(weights, tmp_path / "weights.pt")
    found = of_bits_and_bytes(IN_BITS_AND_BYTES, tmp_path)
    for name, (codes, scales, values, levels) in found.items():
        our_codes, our_scales = quantised(weights[name])
        assert torch.equal(levels, torch.tensor(LEVELS))
        assert torch.equal(our_scales.view(torch.float32).flatten(), scales)
        assert torch.equal(our_codes.flatten(), codes)
        ours = full_tensor(FourBitWeight(our_codes, our_scales, values.dtype))
        assert torch.equal(ours, values)
