"""What is compared of weights that arrived with what an engine computes with."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.weights.package import record
from async_grpo.weights.read_back import COLUMNS, fingerprint, place_of, sampled, sampled_columns


@given(
    st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.randoms(),
)
def test_a_fingerprint_knows_neither_order_nor_padding_nor_the_dtype(values, random):
    shuffled = [*random.sample(values, len(values)), 0.0, -0.0]
    split = random.randrange(len(shuffled))
    parts = torch.tensor(shuffled[:split]).double(), torch.tensor(shuffled[split:])
    assert sum(map(fingerprint, parts)) % 2**64 == fingerprint(torch.tensor(values))


def test_one_changed_value_of_a_sampled_column_changes_the_fingerprint_even_in_its_last_bit():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    before, column = fingerprint(sampled(weight)), int(sampled_columns(96)[3])
    for row in range(64):
        changed = weight.clone()
        changed.view(torch.int16)[row, column] += 1
        assert fingerprint(sampled(changed)) != before


def test_values_that_were_swapped_for_others_of_the_same_sum_are_told_apart():
    seen = {
        fingerprint(torch.tensor([a, 1 - a], dtype=torch.bfloat16).float())
        for a in torch.linspace(0, 0.5, 129).tolist()
    }
    assert len(seen) == 129


def test_a_linear_layer_asked_for_columns_answers_with_what_is_compared():
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
        columns = sampled_columns(24)
        inputs = torch.eye(24, dtype=dtype)[columns]
        assert len(columns) == COLUMNS
        assert fingerprint(torch.nn.functional.linear(inputs, weight)) == fingerprint(sampled(weight))


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that is allocated."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        storages = {part.untyped_storage().data_ptr() for part in args if isinstance(part, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in storages:
            self.num_bytes = max(self.num_bytes, result.untyped_storage().nbytes())
        return result


def test_experts_are_compared_without_copies_of_their_size():
    """Hashing all of a layer of Qwen3-30B would take 11 GB on the device."""
    experts = torch.zeros(16, 96, 512, dtype=torch.bfloat16)
    with LargestTensor() as largest:
        fingerprint(sampled(experts))
        record(experts)
    assert 0 < largest.num_bytes < experts.nbytes


def test_experts_are_compared_alike_one_by_one_and_stacked_and_apart_from_their_router():
    experts = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1))
    together = sum(fingerprint(sampled(expert)) for expert in experts) % 2**64
    assert fingerprint(sampled(experts)) == together
    names = ("experts.gate_up_proj", "experts.2.up_proj.weight", "experts.w13_weight")
    assert {place_of(f"model.layers.0.mlp.{name}") for name in names} == {"model.layers.0.mlp.experts"}
    apart = {
        place_of("model.layers.0.mlp.gate.weight"),
        place_of("model.layers.0.mlp.shared_experts.up_proj.weight"),
    }
    assert "model.layers.0.mlp.experts" not in apart
