"""The linear layer with a LoRA adapter: peft's, with a forward pass that needs less memory."""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn.functional import linear

from async_grpo.modeling.four_bit import FourBitLinear


class LeanLoraLinear(Linear):
    """peft's layer with a forward pass that adds s B A x to W x in place (Hu et al. 2021, equation 3).

    peft makes three temporary tensors as large as the output: B A x, s B A x, and W x. They leave gaps in main memory
    between the tensors that the backward pass needs. These gaps took half as much memory as the activations themselves
    (docs/log.md, 2026-11-28).
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return W x + s B A x; W x alone while adapters are switched off.

        Args:
            x: Inputs (..., in).
            args: Further arguments, with which peft's own forward is used.
            kwargs: As `args`.
        """
        is_plain = not (self.disable_adapters or self.merged or args or kwargs) and x.ndim > 1
        if not is_plain or len(self.active_adapters) != 1 or torch.is_autocast_enabled(x.device.type):
            return super().forward(x, *args, **kwargs)
        (name,) = self.active_adapters
        lora_a: Any = self.lora_A[name].weight
        lora_b: Any = self.lora_B[name].weight
        base: Any = self.base_layer
        # A base in 4 bits computes in the dtype of its inputs
        base_dtype = x.dtype if isinstance(base, FourBitLinear) else base.weight.dtype
        has_equal_dtypes = x.dtype == base_dtype == lora_a.dtype == lora_b.dtype
        if not has_equal_dtypes or self._computes_more_than_lora(name):
            return super().forward(x)
        # Flatten the input before `addmm_` changes the output in place. If the output were changed through a view,
        # autograd would copy its gradient
        rows = x.flatten(0, -2)
        output = base(rows)
        output.addmm_(linear(rows, lora_a), lora_b.T, alpha=self.scaling[name])
        return output.unflatten(0, x.shape[:-1])

    def _computes_more_than_lora(self, name: str) -> bool:
        """Return whether an adapter has dropout, a bias, or another formula (DoRA).

        Only peft's own forward computes these.
        """
        has_dropout = not isinstance(self.lora_dropout[name], nn.Identity)
        return has_dropout or self.lora_bias[name] or name in self.lora_variant
