"""Whether this vLLM still needs the edges for adapters (LoRA), and has what they hold on to; see `test_vllm_edges.py`."""

import inspect
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.punica_wrapper import get_punica_wrapper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker
from vllm_edge import assert_needed, source_of

from async_grpo.inference.config import LORA_RANKS
from async_grpo.inference.vllm_edges import lora_weights
from async_grpo.inference.vllm_edges.lora_on_cpu import GroupedPunica, install_grouped_lora
from async_grpo.inference.vllm_edges.lora_weights import LORA_ID, EngineLora, HeldMatrix
from async_grpo.weights.read_back import fingerprint

on_the_cpu = pytest.mark.skipif(not current_platform.is_cpu(), reason="an edge of the CPU alone")
RANK, WIDTHS, INPUT = 4, (6, 3), 8


def wrapper(kind: type, adapters: list[int]):
    """A wrapper for a batch whose tokens use these adapters (0: none), of two adapters with the ids 1 and 2."""
    made = kind(max_num_batched_tokens=64, max_batches=64, device="cpu")
    mapping = LoRAMapping(tuple(adapters), tuple(adapters), is_prefill=True)
    made.update_metadata(mapping, [1, 2], 3, 100)
    return made


def matrices() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """A and B of two adapters for a layer that joins two matrices."""
    generator = torch.Generator().manual_seed(0)
    a = tuple(torch.randn(2, 1, RANK, INPUT, generator=generator) for _ in WIDTHS)
    b = tuple(torch.randn(2, 1, width, RANK, generator=generator) for width in WIDTHS)
    return a, b


def expected_output(adapters: list[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Token by token."""
    a, b = matrices()
    rows = []
    for adapter, inputs, outputs in zip(adapters, x, y, strict=True):
        slot = adapter - 1
        added = [0.5 * b[part][slot, 0] @ (a[part][slot, 0] @ inputs) for part in range(len(WIDTHS))]
        rows.append(outputs + torch.cat(added) if adapter else outputs)
    return torch.stack(rows)


def applied(kind: type, adapters: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output of the wrapper, input, output of the layer alone)"""
    x, y = torch.randn(len(adapters), INPUT), torch.randn(len(adapters), sum(WIDTHS))
    out = y.clone()
    wrapper(kind, adapters).add_lora_linear(out, x, *matrices(), 0.5, WIDTHS)
    return out, x, y


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_every_token_gets_its_own_adapter_or_none(adapters):
    out, x, y = applied(GroupedPunica, adapters)
    assert torch.allclose(out, expected_output(adapters, x, y), atol=1e-5)
    without = torch.tensor(adapters) == 0
    assert torch.equal(out[without], y[without])  # to the bit


def test_this_vllm_still_gives_tokens_without_an_adapter_the_last_one():
    out, _, y = applied(PunicaWrapperCPU, [0, 1, 0])
    assert_needed(not torch.equal(out[0], y[0]), "leaves tokens without an adapter alone", "lora_on_cpu.py")


@on_the_cpu
def test_vllm_makes_the_wrapper_of_the_edge(monkeypatch):
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_punica_wrapper", platform.get_punica_wrapper)
    install_grouped_lora()
    made = get_punica_wrapper(64, max_batches=4, device=torch.device("cpu"), lora_config=None)
    assert type(made) is GroupedPunica


def test_this_vllm_still_takes_adapters_from_folders_only_and_drops_them_at_every_weight_update():
    # vLLM 0.31 has a field for the library tensorizer, which reads an adapter from a folder
    request_fields = set(LoRARequest.__struct_fields__) - {"tensorizer_config_dict"}
    assert_needed(not any("tensor" in name for name in request_fields), "takes tensors", "lora_weights.py")
    assert "reset_lora_state" in inspect.getsource(Worker.finish_weight_update), (
        "vLLM keeps adapters over a weight update now: `put_adapter_in_place` may be called only if one has arrived"
    )
    mixin = source_of("vllm.v1.worker.lora_model_runner_mixin")
    assert "self.lora_manager = " in mixin and "self._adapter_manager: " in source_of(
        "vllm.lora.worker_manager"
    )
    for name in ("remove_adapter", "add_adapter", "activate_adapter"):
        assert hasattr(LoRAModelManager, name)
    for name in ("self.modules", "self.packed_modules", "self.lora_index_to_id", "self.lora_config"):
        assert f"{name}: " in inspect.getsource(LoRAModelManager) or f"{name} = " in inspect.getsource(
            LoRAModelManager
        )


def test_the_arguments_for_an_adapter_exist_and_the_ranks_are_those_of_this_vllm():
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks

    names = {field.name for field in fields(AsyncEngineArgs)}
    assert {"enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"} <= names
    assert get_args(MaxLoRARanks) == LORA_RANKS


# -- layers that are split over processes


def split_layer(kind: type, **attributes) -> object:
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("kind", "module", "attributes", "counted_a", "counted_b"),
    [
        (ReplicatedLinear, "gate", {}, [0], [0]),
        (ColumnParallelLinear, "up_proj", {}, [0], [0, 1, 2, 3]),
        (RowParallelLinear, "down_proj", {}, [0, 1, 2, 3], [0]),
        (ColumnParallelLinear, "q_proj", {"num_kv_head_replicas": 2}, [0], [0, 1, 2, 3]),
        (ColumnParallelLinear, "k_proj", {"num_kv_head_replicas": 2}, [0], [0, 2]),
    ],
)
def test_a_part_of_the_adapter_that_several_processes_hold_is_counted_once(
    monkeypatch, kind, module, attributes, counted_a, counted_b
):
    layer = split_layer(kind, **attributes)
    counted = {"lora_A": [], "lora_B": []}
    for rank in range(4):
        monkeypatch.setattr(lora_weights, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        for matrix, ranks in counted.items():
            if HeldMatrix(f"model.layers.0.{module}", matrix, layer, torch.ones(1)).is_counted():
                ranks.append(rank)
    assert counted == {"lora_A": counted_a, "lora_B": counted_b}


class Layer(SimpleNamespace):
    """In place of vLLM's layer with an adapter."""

    def __init__(self, num_parts: int) -> None:
        super().__init__(
            base_layer=split_layer(ReplicatedLinear),
            lora_a_stacked=[torch.zeros(1, 1, RANK, INPUT) for _ in range(num_parts)],
            lora_b_stacked=[torch.zeros(1, 1, 6, RANK) for _ in range(num_parts)],
        )


class Manager(SimpleNamespace):
    """In place of vLLM's `LoRAModelManager`, with a fused layer, a plain one, and one of another form."""

    def __init__(self) -> None:
        super().__init__(
            model=SimpleNamespace(),
            lora_config=SimpleNamespace(lora_dtype=torch.float32),
            modules={"m.qkv_proj": Layer(3), "m.o_proj": Layer(1), "m.experts": Layer(2)},
            packed_modules={"m.qkv_proj": ["m.q_proj", "m.k_proj", "m.v_proj"]},
            lora_index_to_id=[None],
        )
        self.added = None

    def remove_adapter(self, adapter_id: int) -> None:
        self.lora_index_to_id = [None]

    def add_adapter(self, model) -> None:
        self.added = model

    def activate_adapter(self, adapter_id: int) -> None:
        self.lora_index_to_id = [adapter_id]
        for path, layer in self.modules.items():
            for part, module in enumerate(self.packed_modules.get(path, [path])):
                if module in self.added.loras:
                    layer.lora_a_stacked[part][0, 0] = self.added.loras[module].lora_a
                    layer.lora_b_stacked[part][0, 0] = self.added.loras[module].lora_b


@pytest.fixture
def adapter(monkeypatch) -> EngineLora:
    monkeypatch.setattr(lora_weights, "get_tensor_model_parallel_rank", lambda: 0)
    return EngineLora(Manager(), RANK, scaling=3.0)


def receive(adapter: EngineLora, module: str, *parts: str) -> dict[str, torch.Tensor]:
    tensors = {"lora_A": torch.randn(RANK, INPUT), "lora_B": torch.randn(6, RANK)}
    named = {f"base_model.model.m.{module}.{part}.weight": tensors[part] for part in parts}
    for name, tensor in named.items():
        adapter.receive(name, tensor)
    return named


def test_the_received_matrices_are_compared_as_they_should_be_used_with_b_scaled(adapter):
    tensors = receive(adapter, "k_proj", "lora_A", "lora_B")
    a, b = tensors
    used, received = adapter.fingerprints()
    assert received == {a: fingerprint(tensors[a]), b: fingerprint(tensors[b] * 3)} and set(
        used.values()
    ) == {0}
    adapter.put_in_place()
    used, received = adapter.fingerprints()
    assert adapter._manager.lora_index_to_id == [LORA_ID] and used == received
    assert {used[name] for name in used.keys() - tensors.keys()} == {
        0
    }  # nothing was received, and nothing is there
    adapter._manager.modules["m.qkv_proj"].lora_b_stacked[2][0, 0, 1, 1] = 0.5
    used, received = adapter.fingerprints()
    assert [name for name in used if used[name] != received[name]] == ["m.v_proj.lora_B"]


def test_layers_that_the_engine_lacks_are_named(adapter):
    assert adapter.missing_layers(["m.q_proj", "m.o_proj"]) == []
    assert adapter.missing_layers(["m.q_proj", "m.experts", "lm_head"]) == ["m.experts", "lm_head"]


@pytest.mark.parametrize(
    ("module", "parts", "problem"),
    [
        ("k_proj", ["lora_A"], "1 parts of the adapter lack one of their two matrices: m.k_proj"),
        (
            "gate",
            ["lora_A", "lora_B"],
            "2 parts of the adapter have no layer in the engine .*: m.gate.lora_A",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(adapter, module, parts, problem):
    receive(adapter, module, *parts)
    with pytest.raises(RuntimeError, match=problem):
        adapter.put_in_place()
    assert adapter._manager.lora_index_to_id == [None] and not adapter.is_in_place()


def test_an_adapter_of_another_rank_is_refused_by_name(adapter):
    adapter.receive("base_model.model.m.o_proj.lora_A.weight", torch.randn(RANK + 1, INPUT))
    adapter.receive("base_model.model.m.o_proj.lora_B.weight", torch.randn(6, RANK + 1))
    with pytest.raises(RuntimeError, match="1 parts of the adapter have another rank than 4: m.o_proj"):
        adapter.put_in_place()
