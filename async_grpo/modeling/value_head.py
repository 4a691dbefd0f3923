"""The critic: one linear layer that reads the expected return off the policy's last hidden state."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class ValueHead(nn.Linear):
    """Hidden states (M, H) -> values (M,), float32 (float64 for float64 input).

    It starts at zero: values are 0, and the trunk feels no value loss before the head's first step. The
    product is float32 whatever the compute dtype, since values near 1 would come out of a bfloat16 one in
    steps of 0.008; that keeps 4 H bytes per value until the backward.

    >>> ValueHead(4)(torch.ones(2, 4)).tolist()
    [0.0, 0.0]
    """

    def __init__(self, hidden_size: int, device: torch.device | None = None) -> None:
        super().__init__(hidden_size, 1, device=device, dtype=torch.float32)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return linear(hidden.to(wide), self.weight.to(wide), self.bias.to(wide))[:, 0]
