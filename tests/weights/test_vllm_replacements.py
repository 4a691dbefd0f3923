"""What `vllm_engine` replaces of vLLM, and whether this vLLM still needs it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as experts_module
from vllm.platforms import current_platform

from async_grpo.weights import vllm_engine


class Method(SimpleNamespace):
    """In place of `UnquantizedFusedMoEMethod`: its kernel notes how often its experts are packed."""

    unquantized_backend = experts_cls = None

    def __init__(self) -> None:
        super().__init__(moe_kernel=None)
        self.packed_layers: list[object] = []

    def _init_moe_kernel(self, layer: object) -> None:
        kernel = SimpleNamespace(process_weights_after_loading=self.packed_layers.append)
        self.moe_kernel = SimpleNamespace(fused_experts=kernel)


@pytest.fixture
def layer(monkeypatch):
    monkeypatch.setattr(
        experts_module,
        "convert_to_unquantized_kernel_format",
        lambda *_, w13_weight, w2_weight, **__: (w13_weight, w2_weight),
    )
    monkeypatch.setattr(experts_module, "replace_parameter", lambda *_, **__: None)
    return SimpleNamespace(moe_config=None)


def test_experts_are_packed_once_at_every_load(layer):
    method = Method()
    for load in range(1, 4):
        vllm_engine.set_up_and_pack_experts(method, layer, None, None)
        assert method.packed_layers == [layer] * load


def test_this_vllm_still_packs_experts_at_the_first_load_alone(layer):
    """If this fails, `set_up_and_pack_experts` is needed no more, and would pack twice: remove it."""
    method = Method()
    for _ in range(3):
        vllm_engine._set_up_experts(method, layer, None, None)
    assert method.packed_layers == [layer]


@pytest.mark.skipif(not current_platform.is_cpu(), reason="other platforms do not pack experts")
def test_the_replacement_is_in_place_on_the_cpu():
    replaced = experts_module.UnquantizedFusedMoEMethod._setup_kernel
    assert replaced is vllm_engine.set_up_and_pack_experts
