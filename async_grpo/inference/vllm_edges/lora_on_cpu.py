"""Apply adapters (LoRA) on the CPU only to their own requests, and without copying an adapter per token.

Written for vLLM 0.32. In a batch that mixes requests with and without an adapter, vLLM's kernels for the CPU index the
adapters with -1 for tokens without one, so that these tokens get the last adapter: their log-probs are wrong by more
than a nat. The kernels also gather a copy of the adapter for each token, which takes up to 60 times as long as two
matrix products. vLLM has no public setting for the kernels, so this module replaces the method of vLLM's CPU platform
that names their class.

Not needed any more when `PunicaWrapperCPU` leaves tokens without an adapter unchanged.
"""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

# The tokens of a batch that use one adapter: a slice if they are neighbors, otherwise their indices (n,) int64
TokensOfAdapter = slice | torch.Tensor


class GroupedPunica(PunicaWrapperCPU):
    """Applies adapters to linear layers by two matrix products per adapter in the batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tokens_by_slot: dict[int, TokensOfAdapter] = {}
        # (id of a layer's stacked matrices A, slot) -> views of the matrices. For a small model, making new views in
        # each step would take as long as the matrix products. `_stacked` keeps the matrices alive, so that no id is
        # reused
        self._views: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._stacked: list[tuple[torch.Tensor, ...]] = []

    def update_metadata(self, *args: Any, **options: Any) -> None:
        """Record which adapter each token of the next step uses. vLLM calls this when it differs from the last step."""
        super().update_metadata(*args, **options)
        self._tokens_by_slot = tokens_by_slot(self.token_lora_indices)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **options: Any,
    ) -> None:
        """Add the output of the adapters to the output of a linear layer, in place.

        Args:
            y: Output of the layer (tokens, out), which may join the outputs of several matrices.
            x: Input of the layer (tokens, in).
            lora_a_stacked: Matrices A of each part of the output, (slots, 1, rank, in) each.
            lora_b_stacked: Matrices B of each part of the output, (slots, 1, width, rank) each.
            scale: Factor of the adapters' output.
            output_slices: Width of each part of the output.
            options: Ignored.
        """
        for slot, tokens in self._tokens_by_slot.items():
            views = self._views_of_slot(slot, lora_a_stacked, lora_b_stacked)
            is_whole = tokens == slice(0, len(x)) if isinstance(tokens, slice) else False
            inputs = x if is_whole else x[tokens]
            begin = 0
            for (a, b), width in zip(views, output_slices, strict=True):
                part = y[:, begin : begin + width]
                begin += width
                if isinstance(tokens, torch.Tensor):
                    part.index_add_(0, tokens, inputs.mm(a).mm(b), alpha=scale)
                else:
                    outputs = part if is_whole else part[tokens]
                    outputs.addmm_(inputs.mm(a), b, alpha=scale)

    def _views_of_slot(
        self, slot: int, lora_a_stacked: tuple[torch.Tensor, ...], lora_b_stacked: tuple[torch.Tensor, ...]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of the transposed matrices A (in, rank) and B (rank, width) of each part of a layer.

        Args:
            slot: Index of the adapter in the stacked matrices.
            lora_a_stacked: See `add_lora_linear`.
            lora_b_stacked: See `add_lora_linear`.
        """
        key = (id(lora_a_stacked), slot)
        if key not in self._views:
            self._stacked += [lora_a_stacked, lora_b_stacked]
            self._views[key] = [
                (a[slot, 0].T, b[slot, 0].T) for a, b in zip(lora_a_stacked, lora_b_stacked, strict=True)
            ]
        return self._views[key]


def tokens_by_slot(slots: torch.Tensor) -> dict[int, TokensOfAdapter]:
    """Return which tokens use the adapter of each slot. Tokens without an adapter are left out.

    Args:
        slots: The slot of each token's adapter (tokens,), or -1 for a token without one.

    >>> tokens_by_slot(torch.tensor([-1, 0, 0])), tokens_by_slot(torch.tensor([0, -1, 0]))
    ({0: slice(1, 3, None)}, {0: tensor([0, 2])})
    """
    groups: dict[int, TokensOfAdapter] = {}
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        indices = (slots == slot).nonzero()[:, 0]
        first = int(indices[0])
        last = int(indices[-1])
        is_contiguous = last - first + 1 == len(indices)
        groups[slot] = slice(first, last + 1) if is_contiguous else indices
    return groups


def wrapper_name(cls: Any) -> str:
    """Replace `CpuPlatform.get_punica_wrapper`: name the class of this module."""
    return f"{GroupedPunica.__module__}.{GroupedPunica.__name__}"


def install_grouped_lora() -> None:
    """Replace `get_punica_wrapper`, only on the CPU. Must be called before the model is loaded."""
    if current_platform.is_cpu():
        type(current_platform).get_punica_wrapper = classmethod(wrapper_name)
