"""`PassPlan`: the numbers of the optimizer steps of a run that trains each batch in several passes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PassPlan:
    """Numbers the steps of a run whose batches have M minibatches and are trained in N passes.

    Each pass takes one optimizer step per minibatch, so a batch takes M * N steps. Minibatches are numbered over the
    run: batch b has the minibatches b * M to (b + 1) * M - 1.

    A cycle is a sequence of steps after which the engines get new weights. With several passes, a cycle is a batch.
    With one pass it is a single step, because each minibatch is then trained once, by the step of its number.

    >>> plan = PassPlan(num_minibatches=2, num_passes=3)
    >>> plan.cycle_steps, plan.first_step(3), plan.last_step(3), plan.next_minibatch(12)
    (6, 7, 11, 4)
    """

    num_minibatches: int = 1  # M, per batch
    num_passes: int = 1  # N

    @property
    def cycle_minibatches(self) -> int:
        """Return the number of minibatches that a cycle trains."""
        return 1 if self.num_passes == 1 else self.num_minibatches

    @property
    def cycle_steps(self) -> int:
        """Return the number of optimizer steps of a cycle."""
        return self.cycle_minibatches * self.num_passes

    def first_step(self, minibatch: int) -> int:
        """Return the first step that trains a minibatch. The first pass trains minibatches in their order."""
        cycle, position = divmod(minibatch, self.cycle_minibatches)
        return cycle * self.cycle_steps + position

    def last_step(self, minibatch: int) -> int:
        """Return the last step of the minibatch's cycle. The minibatch is not trained later."""
        return self.cycle_end(self.first_step(minibatch)) - 1

    def cycle_end(self, step: int) -> int:
        """Return the policy version after the last step of the cycle to which `step` belongs."""
        return (step // self.cycle_steps + 1) * self.cycle_steps

    def ends_cycle(self, version: int) -> bool:
        """Return whether the engines get this policy version: the last step of a cycle made it, or it is the first."""
        return version % self.cycle_steps == 0

    def next_minibatch(self, version: int) -> int:
        """Return the first minibatch that is trained after a version that ends a cycle."""
        return version // self.num_passes

    def minibatches_alive(self, max_staleness: int) -> int:
        """Return how many minibatches may be alive, so that no token is older than `max_staleness` steps.

        A minibatch is alive from the admission of its groups until the weights after its cycle are live. The last step
        of a cycle trains tokens that are at least `cycle_steps` - 1 steps old. 0 means that the bound is too low.
        """
        return (max_staleness + 1) // self.cycle_steps * self.cycle_minibatches


ONE_PASS = PassPlan()
