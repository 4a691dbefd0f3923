"""Check the rewards and other inputs of an estimator. They must be finite at the tokens at which they count."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Shaped
from torch import Tensor

# Largest magnitude of rewards, baselines and values. float64 can represent their squares, and sums of the squares
LARGEST = 1e100
SINGLE_REWARD = "reward"  # name of a reward that was passed as a tensor without a name


def reward_masks(
    options: Mapping[str, Any],
    rewards_by_name: Mapping[str, Float[Tensor, "batch tokens"]],
    readable: Bool[Tensor, "batch tokens"],
) -> dict[str, Bool[Tensor, "batch tokens"]]:
    """Return a mask for each reward: the unmasked tokens of valid rows (`readable`) that the caller's masks select.

    The caller passes its masks as `step_mask` or `masks`. A reward without such a mask gets all readable tokens. The
    estimator's function gets the returned masks in place of the caller's, so it need not check which tokens are
    readable.

    Raises:
        ValueError: A mask has the wrong shape, or belongs to no reward.
    """
    caller_masks = options.get("step_mask", options.get("masks", {}))
    if not isinstance(caller_masks, Mapping):
        caller_masks = {SINGLE_REWARD: caller_masks}
    refuse_unknown("masks", caller_masks, rewards_by_name)
    for name, reward_mask in caller_masks.items():
        if reward_mask.shape != readable.shape:
            raise ValueError(f"the mask of {name} {tuple(reward_mask.shape)} must be {tuple(readable.shape)}")
    return {name: readable & caller_masks.get(name, readable).bool() for name in rewards_by_name}


def refuse_unknown(
    option: str, names: Iterable[str], rewards_by_name: Mapping[str, Float[Tensor, "batch tokens"]]
) -> None:
    """Raise ValueError if an option has an entry for a name that no reward has."""
    unknown = [name for name in names if name not in rewards_by_name]
    if unknown:
        raise ValueError(f"{option} for {unknown}, but there are rewards only for {list(rewards_by_name)}")


def finite_values(
    name: str, values: Shaped[Tensor, "*shape"], *masks: Bool[Tensor, "..."]
) -> Float64[Tensor, "*shape"]:
    """Return the values as float64, with zeros where the mask of the same shape is False.

    Args:
        name: Name of the values, for the error message.
        values: Values with the shape of one of `masks`.
        masks: True where values count; one mask for each shape that the values may have.

    Raises:
        ValueError: No mask has the shape of the values, or a value that counts is not finite. The message names the
            rows.
    """
    counted = next((mask for mask in masks if mask.shape == values.shape), None)
    if counted is None:
        shapes = " or ".join(str(tuple(mask.shape)) for mask in masks)
        raise ValueError(f"{name} {tuple(values.shape)} must be {shapes}")
    finite = torch.where(counted, values, 0).double()
    kind = "rewards" if name == SINGLE_REWARD else name
    refuse_rows(kind, ~torch.isfinite(finite), "are not finite; a missing one must be marked invalid")
    beyond = f"are beyond +-{LARGEST:g}, where statistics of them overflow: give plausible numbers"
    refuse_rows(kind, finite.abs() > LARGEST, beyond)
    return finite


def refuse_rows(kind: str, is_wrong: Bool[Tensor, "batch ..."], reason: str) -> None:
    """Raise ValueError if any entry of `is_wrong` is True; the message names the rows."""
    if is_wrong.any():
        rows = is_wrong.nonzero()[:, 0].unique().tolist()
        raise ValueError(f"the {kind} of rows {rows} {reason}")
