"""`FlowSchedule`: the times of the denoising steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class FlowSchedule:
    """The times of n denoising steps, as the scheduler of the model's folder computes them.

    Step k goes from the time `sigmas[k]` to `sigmas[k + 1]`. The first time is 1 or a little less, the last is 0.
    """

    sigmas: tuple[float, ...]  # n + 1 times
    # n numbers: the times before the steps, in the units in which the model reads them
    timesteps: tuple[float, ...]

    @property
    def num_steps(self) -> int:
        """Return the number of denoising steps."""
        return len(self.timesteps)

    @property
    def t_max(self) -> float:
        """Return the largest time that has a noise scale of its own. All times above it share its scale.

        See `algorithm.flow.sde`.
        """
        return min(self.sigmas[0], self.sigmas[1]) if self.num_steps > 1 else 0.5

    def times(self, steps: Int64[Tensor, " steps"]) -> "StepTimes":
        """Return the times of steps, on the device of their indices."""
        sigmas = _tensor(self.sigmas, steps)
        return StepTimes(
            begin=sigmas[steps],
            end=sigmas[steps + 1],
            timesteps=_tensor(self.timesteps, steps)[steps],
        )

    def times_at(
        self, shares: Float[Tensor, " times"]
    ) -> tuple[Float[Tensor, " times"], Float[Tensor, " times"]]:
        """Return times between the steps, and the same in the units of the model.

        Uniform shares give times with the density of the schedule, so that a shifted schedule has more times where it has
        more steps.

        Args:
            shares: Shares of the steps that are done, at least 0 and below 1.
        """
        places = shares * self.num_steps
        steps = places.long().clamp(max=self.num_steps - 1)
        parts = places - steps
        times = self.times(steps)
        # The last time is 0 in the units of the model, too, because these are multiples of the time
        timesteps = _tensor((*self.timesteps, 0.0), steps)
        return (
            torch.lerp(times.begin, times.end, parts),
            torch.lerp(timesteps[steps], timesteps[steps + 1], parts),
        )


@dataclass(frozen=True)
class StepTimes:
    """The times of some denoising steps, in float32."""

    begin: Float[Tensor, " steps"]
    end: Float[Tensor, " steps"]
    # The times before the steps, in the units in which the model reads them
    timesteps: Float[Tensor, " steps"]


def _tensor(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)
