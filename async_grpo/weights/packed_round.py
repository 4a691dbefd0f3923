"""`PackedRound`: the weights of one round of the self-test, ready to be delivered."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from async_grpo.protocols import Receipt, WeightPackage

# Delivers packed weights. Takes their package without its tensors; returns the whole package, and the workers' receipts by
# worker id
Delivery = Callable[[WeightPackage], tuple[WeightPackage, Mapping[str, Receipt]]]


@dataclass(frozen=True)
class PackedRound:
    """A round of the self-test: weights of which some are changed, packed or already sent."""

    draft: WeightPackage  # the package without its tensors and its tolerance
    sensitivity: float  # sensitivity of the trainer with the changed weights; 0 if it was not measured
    deliver: Delivery | None  # None on ranks that do not talk to the engines


def selected(weights: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the weights with these names, in the order of `weights`.

    >>> list(selected({"b": torch.zeros(1), "a": torch.zeros(1), "c": torch.zeros(1)}, {"a", "b"}))
    ['b', 'a']
    """
    return {name: weight for name, weight in weights.items() if name in names}
