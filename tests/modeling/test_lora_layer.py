"""The layer with an adapter computes what peft's layer does, with fewer tensors of its output's size."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from async_grpo.modeling.lora_layer import LeanLoraLinear

INPUTS, OUTPUTS, ROWS = 6, 10, 7


class OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, OUTPUTS, bias=True)

    def forward(self, x):
        return self.first(x)


def model_with_adapter(is_lean: bool, **settings) -> nn.Module:
    torch.manual_seed(0)
    model = OneLinear()
    config = LoraConfig(r=3, lora_alpha=4, target_modules=["first"], **settings)
    if is_lean:
        config._register_custom_module({nn.Linear: LeanLoraLinear})
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    assert isinstance(model.first, LeanLoraLinear) == is_lean
    nn.init.normal_(model.first.lora_A["default"].weight)
    nn.init.normal_(model.first.lora_B["default"].weight)
    return model


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output, and the gradients of the input and of both matrices."""
    x = x.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    layer = model.first
    gradients = [layer.lora_A["default"].weight.grad, layer.lora_B["default"].weight.grad]
    return [output, x.grad, *(torch.zeros(1) if gradient is None else gradient for gradient in gradients)]


@pytest.mark.parametrize(
    "shape", [(ROWS, INPUTS), (1, ROWS, INPUTS), (2, ROWS, INPUTS), (INPUTS,), (0, INPUTS)]
)
@pytest.mark.parametrize("state", ["on", "off"])
def test_outputs_and_gradients_are_those_of_peft(shape, state):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    lean = model_with_adapter(is_lean=True)
    reference = model_with_adapter(is_lean=False)
    for model in (lean, reference):
        model.first.enable_adapters(state == "on")
    for result, expected in zip(results(lean, x), results(reference, x), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"lora_dropout": 0.5}, {"use_dora": True}, {"lora_bias": True}]
)
def test_what_is_more_than_plain_lora_is_computed_by_peft(settings):
    x = torch.randn(1, ROWS, INPUTS, generator=torch.Generator().manual_seed(1))
    outputs = []
    for is_lean in (True, False):
        model = model_with_adapter(is_lean, **settings)
        if "lora_bias" in settings:
            nn.init.ones_(model.first.lora_B["default"].bias)
        torch.manual_seed(2)  # the same dropout
        outputs.append(model(x))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_a_base_of_another_dtype_than_the_adapter_is_computed_by_peft_and_once():
    lean = model_with_adapter(is_lean=True)
    calls = []
    lean.first.base_layer.register_forward_hook(lambda *arguments: calls.append(1))
    reference = model_with_adapter(is_lean=False)
    x = torch.randn(ROWS, INPUTS).bfloat16()
    for model in (lean, reference):
        model.first.base_layer.bfloat16()
    output = lean(x)
    assert torch.equal(output, reference(x)) and output.dtype is torch.bfloat16
    assert len(calls) == 1


class OutputTensors(TorchDispatchMode):
    """Counts the tensors of the output's size that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (OUTPUTS,) and out.numel() == ROWS * OUTPUTS:
            self.addresses.add(out.data_ptr())
        return out


def test_no_tensor_of_the_output_s_size_is_made_and_thrown_away():
    model = model_with_adapter(is_lean=True)
    with OutputTensors() as tensors:
        output = model(torch.randn(1, ROWS, INPUTS))
    assert tensors.addresses == {output.data_ptr()}
